"""Why is the reward flat? Causes found in the records of a run, with their evidence and what to do about each."""
