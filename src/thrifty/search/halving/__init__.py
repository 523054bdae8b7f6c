"""Successive halving, Hyperband, BOHB and ASHA."""
