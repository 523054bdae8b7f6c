"""Several objectives, constraints, enqueued configurations, priors, and the study of each epoch."""

import sqlalchemy as sa
from alembic import op


revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns and a table, and add the violation to the index of the study status."""
    # All columns are nullable and have no default, so no database rewrites its rows for them.
    op.add_column("epochs", sa.Column("study", sa.Integer))
    op.add_column("trials", sa.Column("objectives", sa.JSON))
    op.add_column("trials", sa.Column("violation", sa.Float))
    op.add_column("log", sa.Column("config", sa.JSON))
    op.drop_index("trials_status", table_name="trials")
    op.create_index(
        "trials_status", "trials", ["study", "state", "value", "number", "target", "violation"]
    )
    op.create_table(
        "priors",
        sa.Column(
            "study", sa.Integer, sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("target", sa.Integer, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
    )
