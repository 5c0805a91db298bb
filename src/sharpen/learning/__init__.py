"""From scored rollouts to new weights: experiences, algorithms, the trainer; rows of a dataset, which need no rollouts.

In: groups of rollouts, or rows; weights. Out: batches, updated weights, checkpoints, the journal of it all. It must not
know where the engine and the trainer live, nor how a run is shown.
"""
