"""Fine-tuning of transformers models: bases, adapters, masks and losses."""
