"""Lines that user code logs while a trial trains, by epoch."""

import sqlalchemy as sa
from alembic import op


revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table; epochs that are there have no lines."""
    op.create_table(
        "log_lines",
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), primary_key=True),
        sa.Column("node", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("num_bytes", sa.Integer, nullable=False),
        sa.Column("lines", sa.Text, nullable=False),
    )
