"""Options that several commands have."""

from __future__ import annotations

import click


storage_option = click.option(
    "--storage",
    default="sqlite:///thrifty.db",
    show_default=True,
    envvar="THRIFTY_STORAGE",
    help="Database address.",
)
