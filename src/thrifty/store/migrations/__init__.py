"""Migration of a database to the current schema: numbered steps, run by Alembic.

Alembic is slow to import, so this package is imported only when there is something to migrate.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from thrifty.store._schema import VERSION


def upgrade(connection: Connection) -> None:
    """Run the migrations that a database lacks, in the transaction of the connection."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, VERSION)
