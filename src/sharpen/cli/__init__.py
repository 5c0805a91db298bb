"""The `sharpen` command line, with what `init` writes (`starter`) and `doctor` looks at.

In: arguments. Out: exit codes that tell the truth, and text that fits the terminal.

- `main`: the command, its exit codes, its help
- `arguments`: arguments that several commands have
- `training`: `sharpen run`, `check`, `eval`
- `init`: `sharpen init`
- `starter/`: what it writes
- `doctor/`: `sharpen doctor`
- `plan`: `sharpen plan`
- `explain`: `sharpen explain`
- `effective`: what a setting that nobody gave comes to; loaded when it is asked for
- `list_runs`: `sharpen ls`
- `show`: `sharpen show`
- `show_list`: the last groups, the rollouts that filters choose, or a held-out task before and after
- `page`: one rollout on the terminal
- `compare`: `sharpen compare`
- `diagnose`: `sharpen diagnose`
- `certify`: `sharpen certify`
- `rescore`: `sharpen rescore`
- `judge`: a judge against its owner's marks, and the marks
- `report`: `sharpen report`
- `view`: `sharpen view`
- `export`: `sharpen export`
- `serve`: `sharpen serve`
- `record`: `sharpen record`
- `seeds`: `sharpen seeds`
- `sweep`: `sharpen sweep`
- `algorithms`: `sharpen algorithms`
- `algorithm_text`: its text; loaded when it is asked for
- `models`: `sharpen models`
- `trinity`: the command `trinity`
"""
