"""Replicas of a trial: the seed of each node, and the nodes of each trial's replicas."""

import sqlalchemy as sa
from alembic import op


revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns; what is there was trained with its study's own seed, which is replica 0."""
    op.add_column("nodes", sa.Column("replica", sa.Integer, nullable=False, server_default="0"))
    op.add_column("trials", sa.Column("replicas", sa.JSON))
