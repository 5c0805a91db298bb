"""Another judge over the rollouts that a run has stored, and what it would have changed."""
