"""Time of checks, ranges of the time that an epoch takes alone, and structures not to fuse."""

import sqlalchemy as sa
from alembic import op


revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns and a table.

    ``seconds_alone`` was NULL if a trial was trained alone; now it is the measured time itself.
    Existing values come from a single measurement, which is too little information to keep them.
    """
    for name in ("seconds_checks", "again_checks_s"):
        op.add_column("epochs", sa.Column(name, sa.Float, nullable=False, server_default="0"))
    for name in ("seconds_alone_low", "seconds_alone_high"):
        op.add_column("epochs", sa.Column(name, sa.Float))
    for name in ("again_alone_low_s", "again_alone_high_s"):
        op.add_column("epochs", sa.Column(name, sa.Float, server_default="0"))
        op.execute(
            f"UPDATE epochs SET {name} = "
            "CASE WHEN again_alone_s = again_s THEN again_alone_s ELSE NULL END"
        )
    op.execute(
        "UPDATE epochs SET seconds_alone = "
        "CASE WHEN seconds_alone IS NULL THEN seconds ELSE NULL END"
    )
    op.create_table(
        "refusals",
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), primary_key=True),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("study", sa.Integer),
        sa.Column("at", sa.Float, nullable=False),
    )
