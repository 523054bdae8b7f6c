"""Parts of ``bench_bandits``."""
