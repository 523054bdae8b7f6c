"""Checks that a batch may be split among workers."""
