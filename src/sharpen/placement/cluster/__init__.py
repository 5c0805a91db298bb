"""The parts of a run in actors of Ray."""
