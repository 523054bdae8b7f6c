"""What a stage's worker has used: its device, and its peak memory."""

import sqlalchemy as sa
from alembic import op


revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns; stages that are there were not measured, which is NULL."""
    op.add_column("stages", sa.Column("device", sa.Text))
    op.add_column("stages", sa.Column("peak_bytes", sa.BigInteger))
