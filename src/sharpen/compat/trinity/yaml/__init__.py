"""Trinity-RFT's configuration files: what each key becomes here. `conversion` is where to begin.

- `conversion`: a file becomes our settings
- `table`: every key, with its rule
- `rules`: the rules that the table is made of
- `draft`: what was found so far: settings, lines to print, problems
- `keys`: rules of single keys
- `functions`: its algorithms and functions, and ours
- `algorithm`: the section `algorithm`
- `correction`: its rollout correction, which is verl's
- `expert`: its expert's rows
- `tasks`: tasks, workflow, auxiliary models
- `selection`: in which order tasks are taken
- `rows`: files that train on rows
- `run`: mode, name, sizes, lengths
- `synchronizer`: when weights move
- `cluster`: machines and GPUs
- `operators`: the section `data_processor`
- `stages`: several runs in one file
- `interpolation`: `${...}` in values
- `former`: keys of earlier versions
"""
