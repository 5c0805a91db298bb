"""What makes an agent better beside a single training: prompts, the choice of a model, seeds, sweeps.

In: a workflow, a judge, tasks, and candidates or settings. Out: the best of them, with intervals. It must not know how
a run trains.

- `prompt_tune/`: a better system prompt
- `model_selection/`: the best of several models
- `trials/`: candidates on the same tasks
- `several`: one configuration several times, with an interval
- `sweep`: searches settings by Optuna
"""
