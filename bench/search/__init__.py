"""Parts of ``bench_search``."""
