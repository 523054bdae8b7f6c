"""The sweeper of Hydra that asks thrifty what to run: ``hydra/sweeper: thrifty``."""
