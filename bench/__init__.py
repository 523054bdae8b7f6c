"""Benchmarks: ``python -m bench.bench_<thing>``."""
