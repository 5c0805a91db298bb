"""A folder to start from: an agent, a judge, tasks, settings, a test, and a tiny model made on the spot."""
