"""Why is the reward flat? Finds causes in the records of a run, with evidence and advice for each."""
