"""The first schema."""

import sqlalchemy as sa
from alembic import op


revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _key(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, primary_key=True, autoincrement=False)


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "plans",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("identity", sa.String(64), nullable=False, unique=True),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "leases",
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("study", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("pid_started", sa.Text, nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("heartbeat", sa.Float, nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), primary_key=True),
        _key("node"),
        sa.Column("parent", sa.Integer),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("epochs", sa.Integer, nullable=False),
    )
    op.create_table(
        "epochs",
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), primary_key=True),
        _key("node"),
        _key("epoch"),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("worker", sa.Text, nullable=False),
    )
    op.create_table(
        "checkpoints",
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), primary_key=True),
        _key("node"),
        _key("epoch"),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
    )
    op.create_table(
        "stages",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), nullable=False, index=True),
        sa.Column("node", sa.Integer, nullable=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("stop", sa.Integer, nullable=False),
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
    )
    _upgrade_studies()


def _upgrade_studies() -> None:
    op.create_table(
        "studies",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("plan", sa.Integer, sa.ForeignKey("plans.id"), nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "trials",
        sa.Column(
            "study", sa.Integer, sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True
        ),
        _key("number"),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("node", sa.Integer, nullable=False),
        sa.Column("group", sa.JSON, nullable=False),
        sa.Column("parent", sa.JSON),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("target", sa.Integer, nullable=False),
        sa.Column("reached", sa.Integer, nullable=False),
        sa.Column("value", sa.Float),
        sa.Column("error", sa.JSON),
    )
    op.create_index("trials_status", "trials", ["study", "state", "value", "number", "target"])
    op.create_table(
        "log",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(
            "study",
            sa.Integer,
            sa.ForeignKey("studies.id", ondelete="CASCADE"),
            nullable=False,
            index=True,
        ),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("trial", sa.Integer, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("value", sa.Float),
        sa.Column("at", sa.Float, nullable=False),
    )
