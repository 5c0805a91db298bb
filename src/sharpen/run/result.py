"""What `tune()` gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sharpen.monitor.statistics import Accuracy, Evaluation
from sharpen.monitor.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What came out of a run.

    `verdict` says whether the run made the model better and which model to use: a checkpoint, or the original.
    `model_dir` is the checkpoint of the last step, a Hugging Face directory; `best_model_dir` the one that evaluated
    best, maybe by luck (the original, where it was better than every checkpoint; the last step, where nothing was
    evaluated). `before` and `after` hold the accuracy on held-out tasks with its 95% interval, by mode (`greedy`,
    `sampled`); `rewards_before` and `rewards_after` the reward of every task; `loss_before` and `loss_after` (without
    rollouts) the loss on held-out rows. Empty and None where nothing was evaluated.
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
