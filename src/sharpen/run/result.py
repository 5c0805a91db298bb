"""The result of `tune()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sharpen.monitor.statistics import Accuracy, Evaluation
from sharpen.monitor.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of a run.

    `verdict` says whether the run made the model better and which model to use: a checkpoint, or the original.
    `model_dir` is the checkpoint of the last step, a Hugging Face directory. `best_model_dir` is the model that
    evaluated best, possibly by luck: a checkpoint, the original if it was better than every checkpoint, or the last
    step if nothing was evaluated. `before` and `after` map each mode (`greedy`, `sampled`) to the accuracy on held-out
    tasks with its 95% interval; `rewards_before` and `rewards_after` hold the reward of every task; `loss_before` and
    `loss_after` hold the loss on held-out rows, in a run without rollouts. Without an evaluation they are empty or
    None.
    """

    run_dir: Path
    model_dir: Path
    best_model_dir: Path
    before: Mapping[str, Accuracy]
    after: Mapping[str, Accuracy]
    rewards_before: Evaluation | None
    rewards_after: Evaluation | None
    steps: int
    verdict: Verdict
    loss_before: float | None = None
    loss_after: float | None = None
