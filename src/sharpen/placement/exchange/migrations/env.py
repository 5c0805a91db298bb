"""What alembic runs: the migrations, on the connection that `exchange.database.upgrade` gives it."""

from alembic import context

from sharpen.placement.exchange.database import VERSIONS

context.configure(connection=context.config.attributes["connection"], version_table=VERSIONS)
context.run_migrations()
