"""The configuration of a run: YAML and keyword arguments, resolved into one validated, immutable object.

In: files, the command line, arguments, what they point to (functions, rows). Out: `RunConfig`, with where each value
comes from. It must not know of any room that reads it.

- `run`: the whole configuration of a run, section by section, with its defaults
- `sections`: its small sections: `cluster`, `gateway`, `journal`, `sync`
- `distill`: its section on teachers
- `trainer`: its sections on how weights are updated
- `public`: the objects that users build in Python, such as `DatasetConfig` and `WorkflowOutput`
- `load`: from a YAML file and arguments to a `RunConfig` that knows where each value came from
- `explain`: what is wrong with a configuration, in sentences
- `problems`: all problems of a run's arguments as one error
- `rows`: reads datasets: tasks to train on, or plain rows
- `functions`: imports the functions that YAML names, and sets the variables that they find
- `doors`: finds parts that others bring, by import path or entry point
- `resuming`: which settings may change when a run continues, and why
- `recorded`: when a run last recorded something
- `secrets`: what is secret in settings and texts, and what stands in its place
- `extras`: the command that installs a missing extra
"""
