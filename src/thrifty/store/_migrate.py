"""Brings a database up to date. Alembic is slow to import, so this file is loaded only when there is something to do."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from ._schema import VERSION


def upgrade(connection: Connection) -> None:
    """Runs the migrations that a database lacks, in the transaction of the connection."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, VERSION)
