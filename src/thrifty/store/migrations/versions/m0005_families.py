"""Families of plans that train the same, and the states and epochs that plans share."""

import sqlalchemy as sa
from alembic import op


revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns, which are NULL in existing rows."""
    op.add_column("plans", sa.Column("family", sa.String(64)))
    op.create_index("ix_plans_family", "plans", ["family"])
    op.add_column("checkpoints", sa.Column("train_loss", sa.Float))
    op.add_column("epochs", sa.Column("evaluated", sa.Boolean))
