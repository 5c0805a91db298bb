"""A dataset path in, `Task`s out, in an order whose position can be saved."""
