"""Studies that were deleted and can be restored."""

import sqlalchemy as sa
from alembic import op


revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "trash",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), nullable=False, index=True),
        sa.Column("num_trials", sa.Integer, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("nodes", sa.JSON, nullable=False),
        sa.Column("rows", sa.LargeBinary, nullable=False),
    )
