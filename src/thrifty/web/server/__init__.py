"""Serving: addresses, access, limits and cached answers."""
