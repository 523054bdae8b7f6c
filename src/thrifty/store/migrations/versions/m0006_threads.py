"""The number of CPU threads of a plan's workers, and epochs that were trained again."""

import sqlalchemy as sa
from alembic import op


revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns. The number of threads of existing plans is unknown."""
    op.add_column("plans", sa.Column("threads", sa.Integer))
    op.add_column("epochs", sa.Column("again", sa.Integer, nullable=False, server_default="0"))
    for name in ("again_s", "again_alone_s"):
        op.add_column("epochs", sa.Column(name, sa.Float, nullable=False, server_default="0"))
