"""A trainer of several processes: the code of each rank, and the coordinator's side."""
