"""A healthy run's numbers, in which the tests plant one cause each."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.config.public import DatasetConfig, TunerModelConfig
from sharpen.config.run import RunConfig
from sharpen.evidence.diagnose.data import Digest, RolloutRunData
from sharpen.evidence.diagnose.series import StepRow
from sharpen.types import Outcome

STEPS = 40
GROUPS, SIZE = 12, 8


def config(**sections: Any) -> RunConfig:
    """A configuration; sections as keyword arguments."""
    return RunConfig(
        train_dataset=DatasetConfig(path="data"),
        model=TunerModelConfig(model_path="model", max_model_len=1024),
        **sections,
    )


def noisy(start: float, end: float, noise: float, *, steps: int = STEPS, seed: int = 0) -> list[float]:
    """A straight line with normal noise."""
    draw = random.Random(seed)
    return [start + (end - start) * step / max(1, steps - 1) + draw.gauss(0.0, noise) for step in range(steps)]


def curves(steps: int = STEPS, **changes: Sequence[float]) -> dict[str, list[float]]:
    """Metrics of a run that learns, by name with `__` for `/`; `changes` replace some, shorter ones end early."""
    found = {
        "reward__mean": noisy(0.3, 0.7, 0.03, steps=steps, seed=1),
        "reward__std": [0.45] * steps,
        "reward__flat_groups": [3.0] * steps,
        "rollout__count": [float(GROUPS * SIZE)] * steps,
        "rollout__excluded_share": [0.0] * steps,
        "rollout__sampled_tokens": noisy(100.0, 130.0, 5.0, steps=steps, seed=2),
        "rollout__truncated_share": [0.01] * steps,
        "gateway__tool_parse_errors": [0.03] * steps,
        "batch__loss_tokens": [9000.0] * steps,
        "trainer__trained_tokens": [9000.0] * steps,
        "trainer__entropy": noisy(0.6, 0.3, 0.01, steps=steps, seed=3),
        "trainer__grad_norm": noisy(0.4, 0.3, 0.02, steps=steps, seed=4),
        "trainer__clip_fraction": [0.01] * steps,
        "trainer__kl_old": [1e-4] * steps,
        "trainer__kl_reference": noisy(0.002, 0.05, 1e-4, steps=steps, seed=5),
        "trainer__learning_rate": [1e-6] * steps,
        "trainer__num_updates": [1.0] * steps,
    }
    return found | {name: list(values) for name, values in changes.items()}


def rows(metrics: Mapping[str, Sequence[float]]) -> tuple[StepRow, ...]:
    """Steps from curves; what is NaN is absent."""
    steps = max(map(len, metrics.values()))
    return tuple(
        StepRow(
            step=step + 1,
            metrics={
                name.replace("__", "/"): values[step]
                for name, values in metrics.items()
                if step < len(values) and not math.isnan(values[step])
            },
        )
        for step in range(steps)
    )


def group(number: int, rewards: Sequence[float | None], **changes: Any) -> list[Digest]:
    """A group's rollouts, each with tokens of its own. A callable in `changes` gets the rollout's index."""
    return [
        Digest(
            **{
                "id": f"step-{number}/train/{number}/{index}",
                "group_id": f"step-{number}/train/{number}",
                "task_id": f"train/{number}",
                "outcome": Outcome.OK if reward is not None else Outcome.JUDGE_ERROR,
                "reward": reward,
                "num_calls": 2,
                "num_tokens": 120,
                "repeated": 0.05,
                "fingerprint": f"{number}/{index}",
            }
            | {name: value(index) if callable(value) else value for name, value in changes.items()}
        )
        for index, reward in enumerate(rewards)
    ]


MIXED = (1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0)


def groups(rewards: Sequence[float | None] = MIXED, count: int = GROUPS, **changes: Any) -> tuple[Digest, ...]:
    """Several groups of the same rewards."""
    return tuple(seen for number in range(count) for seen in group(number, rewards, **changes))


def run_data(*, metrics: Mapping[str, Sequence[float]] | None = None, **changes: Any) -> RolloutRunData:
    """A run, healthy where nothing else is said."""
    values: dict[str, Any] = {
        "config": config(),
        "scale_free": True,
        "rows": rows(metrics if metrics is not None else curves()),
        "first": groups(),
        "last": groups(),
    }
    data = {**values, **changes}
    scored = sum(one.reward is not None for one in data["last"])
    counts = {"ok": 10 * scored, "judge_error": 10 * (len(data["last"]) - scored)}
    return RolloutRunData(**{"outcomes": counts, **data})
