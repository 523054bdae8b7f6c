"""Parts of ``bench_graph``."""
