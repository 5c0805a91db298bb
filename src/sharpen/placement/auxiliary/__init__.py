"""Auxiliary models, which are not trained: served by an engine of the run, or by an endpoint."""
