"""Horizons of trials: the epoch at which each trial's training ends."""

import sqlalchemy as sa
from alembic import op


revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column; trials that are there end at the max_epochs of their study, which is NULL."""
    op.add_column("trials", sa.Column("horizon", sa.Integer))
