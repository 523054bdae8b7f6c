"""Numbered migrations of the store (Alembic)."""
