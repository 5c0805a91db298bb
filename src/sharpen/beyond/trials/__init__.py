"""Runs an agent with different models or prompts on the same tasks, so that they can be compared.

In: the user's workflow and judge, tasks, and the workflow arguments that differ between candidates. Out: the reward of
each task, and which tasks failed and why. `prompt_tune` and `model_selection` decide by these results.

- `models`: the models of a candidate, served here or its own
- `ranking`: candidates in order, with intervals
"""
