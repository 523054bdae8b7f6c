"""Parts of ``bench_pack``."""
