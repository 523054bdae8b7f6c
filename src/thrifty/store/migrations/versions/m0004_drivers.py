"""Several drivers on one plan: revisions, claims, and leases of studies."""

import sqlalchemy as sa
from alembic import op


revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns and a table, and replace the table of leases by an empty one.

    Leases only say which processes run now, so nothing is lost.
    """
    for table, column in (
        ("plans", "revision"),
        ("nodes", "revision"),
        ("epochs", "revision"),
        ("checkpoints", "revision"),
        ("studies", "batch"),
    ):
        op.add_column(table, sa.Column(column, sa.BigInteger, nullable=False, server_default="0"))
    op.create_index("epochs_revision", "epochs", ["plan", "revision"])
    op.create_index("checkpoints_revision", "checkpoints", ["plan", "revision"])
    op.create_table(
        "claims",
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), primary_key=True),
        sa.Column("node", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("stop", sa.Integer, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
    )
    op.create_index("ix_claims_owner", "claims", ["owner"])
    op.drop_table("leases")
    op.create_table(
        "leases",
        sa.Column(
            "study", sa.Integer, sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("shared", sa.Boolean, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("pid_started", sa.Text, nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("heartbeat", sa.Float, nullable=False),
    )
    op.create_index("ix_leases_plan", "leases", ["plan"])
