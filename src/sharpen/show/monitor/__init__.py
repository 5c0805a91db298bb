"""Metrics in; TensorBoard, JSONL, W&B, MLflow or SwanLab, the reward curve and the summary out.

- `display`: lines for steps and evaluations, and what happens now
- `live`: those at the bottom of a terminal
- `notebook`: where they are: a terminal, the output of a cell, nowhere
- `stream`: output streams that may close
- `spent`: how the time of a step is spent
- `metrics`: `metrics.jsonl`, and every monitor that is asked for, which may fail or be slow
- `tensorboard`: TensorBoard's files
- `services`: W&B, MLflow, SwanLab, Trackio
- `statistics`: means and paired differences with their intervals
- `verdict`: better or not, and which model to use
- `table`: before and after, side by side
- `figures`: numbers as people read them
- `summary`: `summary.json`: what came of a run, and what it used
- `curve`: `reward_curve.png`, drawn from `metrics.jsonl`
"""
