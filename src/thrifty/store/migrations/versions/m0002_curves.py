"""Pack curves, and the time that an epoch would take alone."""

import sqlalchemy as sa
from alembic import op


revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a table and a column."""
    op.create_table(
        "curves",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("structure", sa.Text, nullable=False),
        sa.Column("curves", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    # The column is nullable and has no default, so no database rewrites its rows for it.
    op.add_column("epochs", sa.Column("seconds_alone", sa.Float))
