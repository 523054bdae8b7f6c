"""One worker's share of the training."""
