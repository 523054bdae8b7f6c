"""The CPU threads that a plan is trained with; epochs that had to be trained again."""

import sqlalchemy as sa
from alembic import op


revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns. How many threads an older plan was trained with is not known."""
    op.add_column("plans", sa.Column("threads", sa.Integer))
    op.add_column("epochs", sa.Column("again", sa.Integer, nullable=False, server_default="0"))
    for name in ("again_s", "again_alone_s"):
        op.add_column("epochs", sa.Column(name, sa.Float, nullable=False, server_default="0"))
