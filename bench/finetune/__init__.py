"""Parts of ``bench_finetune``."""
