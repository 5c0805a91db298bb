"""Candidates for one place in an agent (a model, a prompt), each tried on the same tasks.

In: the user's workflow and judge, tasks, the arguments that differ between candidates. Out: the reward of each task,
what failed and why. `prompt_tune` and `model_selection` choose by it.
"""
