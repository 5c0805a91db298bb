"""A run: `decide` settles it, `plan` predicts it, `assembly` builds it, `loop` trains it step by step from a source of
batches, `outcome` writes the results.

In: a configuration and the user's functions. Out: a run directory with a better model, or none, and the proof. It must
not know of the command line, nor of servers around it.

- `decide`: settles a run before anything is loaded: its `Job`
- `plan/`: predicts memory and time
- `assembly`: makes the parts of a run, and closes them
- `loop`: the run itself, step by step
- `source`: what a source of batches is, and a step's outcome
- `rollouts`: the source of a run that learns from rollouts
- `rows`: the source of a run that learns from rows
- `expert`: an expert's rows beside rollouts
- `explorer`: starts rollouts, also ahead, and loads weights into the engine
- `explore`: half of a run in two processes: rolls out
- `receiver`: the other half: gets batches, publishes weights
- `data`: reads the tasks of a run
- `evaluation`: held-out tasks, greedy and sampled
- `judging`: before the training: the judge against its owner's marks
- `check`: before the training: a few tasks, and the gradient of a small batch
- `progress`: how far a run is
- `steps`: checkpoints, and the time limit
- `repeats`: which updates are made a second time while the run goes on
- `outcome`: the verdict, and all files at the end
- `result`: what `tune()` returns
- `directory`: a run's folder, made or opened again
- `lock`: one process at a time writes there
- `same_run`: whether a run goes on with what it began with
- `identity`: digests of datasets, and of parts that the user brings
- `found`: finds runs on this disk
- `forecast`: the plan before a run: what is chosen, what is refused; and how right it was
- `panel`: the first lines that are printed
- `stall`: says who waits for whom when nothing moves
"""
