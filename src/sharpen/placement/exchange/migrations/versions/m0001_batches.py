"""Batches by number: the table that Sharpen had before it kept versions of its tables, and may have made."""

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the table, unless an earlier Sharpen did."""
    op.execute(
        "CREATE TABLE IF NOT EXISTS sharpen_exchange "
        "(run text NOT NULL, number integer NOT NULL, content bytea NOT NULL, PRIMARY KEY (run, number))"
    )
