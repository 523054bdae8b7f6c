"""Hyper-parameter tuning that never pays twice."""

__version__ = "0.1.0"
