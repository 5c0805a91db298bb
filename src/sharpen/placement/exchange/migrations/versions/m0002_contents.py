"""Contents by name, in parts: weights and the trainer's note beside the batches, so that no folder is shared."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Move the batches into the new table."""
    op.execute(
        "CREATE TABLE sharpen_contents (run text NOT NULL, name text NOT NULL, part integer NOT NULL, "
        "content bytea NOT NULL, PRIMARY KEY (run, name, part))"
    )
    op.execute(
        "INSERT INTO sharpen_contents SELECT run, 'batches/' || lpad(number::text, 6, '0') || '.batch', 0, content "
        "FROM sharpen_exchange"
    )
    op.execute("DROP TABLE sharpen_exchange")
