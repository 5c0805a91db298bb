"""Predicts the memory and time of a run before it starts, and what to change if it does not fit.

- `predict`: the plan: what it needs, whether it fits, what to change
- `fit`: the settings that a run chooses so that it fits
- `case`: what is planned: recipe, models, devices, tokens
- `hardware`: the devices
- `sizes`: a model's sizes, counted without its weights
- `workload`: the tokens of a step
- `memory`: the peak memory of each device
- `live`: that of a training pass, measured on tensors without contents
- `speed`: the seconds of a step, by a copy of the model with two layers
- `record`: compares a run with its plan
"""
