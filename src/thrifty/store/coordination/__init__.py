"""Coordination of several drivers on one plan: leases, claims, turns."""
