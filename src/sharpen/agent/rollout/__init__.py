"""Runs a workflow and a judge on `Task`s; returns groups of scored `Rollout`s, with failures classified by cause.

- `runner`: many rollouts at a time: slots, sessions, retries, groups
- `in_process`: one attempt, asked for and answered, on the user loop and under its time limit
- `attempt`: calls the workflow, then the judge, and makes an outcome of whatever they do
- `models`: the models that one attempt may use until it ends
- `user_loop`: the thread on which the user's code runs; one that hangs is left and replaced
- `signature`: the arguments that workflow and judge take
- `retries`: which failures are final, and which retries gave other answers
- `rewards`: the numbers that user code returns, or what is wrong with them
- `choices`: which of several answers to one request the agent used
- `refill`: replaces the groups of a step that cannot train
- `statistics`: rewards, failures, lengths and times of groups, in numbers
- `check`: the check before a run: whether there is anything to learn, and what to fix
- `places`: errors and places in the user's code, in words
"""
