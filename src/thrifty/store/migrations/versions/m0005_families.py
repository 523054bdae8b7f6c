"""Families of plans: which plans train the same, and what one of them took over from another."""

import sqlalchemy as sa
from alembic import op


revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns, all of them empty for what is there."""
    op.add_column("plans", sa.Column("family", sa.String(64)))
    op.create_index("ix_plans_family", "plans", ["family"])
    op.add_column("checkpoints", sa.Column("train_loss", sa.Float))
    op.add_column("epochs", sa.Column("evaluated", sa.Boolean))
