"""The parts of a run as actors of Ray."""
