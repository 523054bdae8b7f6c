"""What people ask of a study: stopping it or one of its trials, notes and tags."""

import sqlalchemy as sa
from alembic import op


revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "acts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(
            "study",
            sa.Integer,
            sa.ForeignKey("studies.id", ondelete="CASCADE"),
            nullable=False,
            index=True,
        ),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("trial", sa.Integer),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("applied_at", sa.Float),
        sa.Column("answer", sa.Text, nullable=False, server_default=""),
    )
