"""User code that tries to break sharing, each piece with a plain PyTorch loop beside it."""
