"""Parts of ``bench_schedules``: spaces of schedules, and searches on tables of their curves."""
