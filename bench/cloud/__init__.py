"""Parts of ``bench_cloud``."""
