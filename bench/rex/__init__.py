"""Parts of ``bench_rex``."""
