"""Simulations of a study on made-up workers."""
