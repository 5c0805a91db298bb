"""Records what applications say to a model that another server serves."""
