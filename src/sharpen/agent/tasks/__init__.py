"""Reads datasets, and draws `Task`s in an order whose position can be saved."""
