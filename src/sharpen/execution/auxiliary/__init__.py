"""Models beside the one that is tuned: served here, or by an endpoint elsewhere."""
