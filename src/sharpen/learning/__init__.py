"""From scored rollouts to new weights: experiences, algorithms, the trainer; rows of a dataset, which need no rollouts.

In: groups of rollouts, or rows; weights. Out: batches, updated weights, checkpoints, the journal of it all. It must not
know where the engine and the trainer live, nor how a run is shown.

- `recipe`: what a run is: algorithm, sizes, schedule, decided once
- `schedule`: when to roll out, train and sync, as a pure function of counters
- `experience/`: from groups to batches, and the journal of both
- `algorithm/`: the formulas
- `trainer/`: from batches to new weights
- `supervised/`: training on rows of a dataset
"""
