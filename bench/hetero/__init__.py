"""Parts of ``bench_hetero``."""
