"""Parts of ``bench_dashboard``."""
