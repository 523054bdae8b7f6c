"""User attributes of trials: JSON values beside the metrics of an epoch."""

import sqlalchemy as sa
from alembic import op


revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column; epochs that are there have no attributes, which is NULL."""
    op.add_column("epochs", sa.Column("attributes", sa.Text))
