"""Parts of ``bench_gyro``."""
