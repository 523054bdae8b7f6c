"""Parts of ``bench_cluster``."""
