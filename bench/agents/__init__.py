"""Parts of ``bench_agents``."""
