"""A trainer of several processes: what runs in each, and how the coordinator reaches them."""
