"""How many samples each worker gets."""
