"""A thrifty database for Optuna's tools: a read-only view, and a copy."""
