"""Looks at a machine: what a run needs, what is here, what to do."""
