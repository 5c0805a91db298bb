"""Checks what a run trained against its records, with code of its own: in every step, and offline from `run.db`.

- `certificate`: the certificate itself, one file, and what adds up to it
- `certify`: makes it again from a run's records alone
- `checks`: its invariants by name, and how results are worded
- `audit`: the checks of a step: what trains against what was recorded
- `delivery`: what the trainer receives, in a form that is stored
- `rules`: what the settings require of a step
- `expectation`: what a step must train, by these rules
- `formulas`: the advantages, a second time
- `role_baselines`: the moving baselines of `rae`, from the rewards of all steps before
- `brought`: formulas of an algorithm that is not ours
- `sources`: the files of such an algorithm, and what is not recomputed of it
- `draws`: whether sampled tokens come from the recorded distributions
- `constraints`: whether constrained tokens keep to their grammar and truncated ones to their support, and whether
  recorded experts are possible
- `lineage`: which of the recorded steps led to a run's weights
- `saved_weights`: whether the checkpoints are as they were written
- `rollouts`: the checks of a run's steps, again from its journal; replayed groups are drawn once more, images compared
- `rows`: those of a run without rollouts, again from its dataset
- `verdict`: the verdict, again from the evaluations
- `evaluations`: the rewards of the evaluations, again from their rollouts
- `intervals`: intervals and the test of a verdict, a second time
- `plain/`: updates made a second time, by a plain loop that shares nothing with the trainer
- `likeness`: whether two sets of weights are the same but for rounding
- `gradient_probe`: before a run: the trainer's gradient against the plain loop's
- `probe_batch`: the small batch that it compares them on
"""
