"""The tables of the exchange in a database, version by version, for alembic."""
