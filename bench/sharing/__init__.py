"""Parts of ``bench_sharing``."""
