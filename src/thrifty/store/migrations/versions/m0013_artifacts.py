"""Artifacts of trials: files that an epoch names by their content."""

import sqlalchemy as sa
from alembic import op


revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column; epochs that are there have no artifacts, which is NULL."""
    op.add_column("epochs", sa.Column("artifacts", sa.Text))
