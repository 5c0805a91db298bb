"""What a run did, held against its records by code of its own: online in every step, offline from `run.db`."""
