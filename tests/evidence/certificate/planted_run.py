"""A step with two minibatches, and the run directory that it leaves: what faults are planted in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from experience_builders import make_call, make_group, make_rollout

from sharpen.config.load import ResolvedConfig, resolve, write_resolved
from sharpen.evidence.certificate.audit import audit
from sharpen.evidence.certificate.delivery import delivery
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.experience.draw import Batch, draw_batches
from sharpen.learning.experience.journal import Journal
from sharpen.learning.recipe import algorithm_of
from sharpen.types import Call, Check, Group, Outcome, Rollout

VERSION = 0
MINIBATCHES = 2


def resolved(**settings: Any) -> ResolvedConfig:
    """Four tasks of four rollouts in two minibatches."""
    values = {
        "train_dataset.path": "tasks.jsonl",
        "model.model_path": "toy",
        "model.max_model_len": 64,
        "model.max_tokens": 16,
        "algorithm.algorithm_type": "grpo",
        "algorithm.batch_size": 4,
        "algorithm.group_size": 4,
        "trainer.num_minibatches": MINIBATCHES,
    }
    return resolve(None, values | settings, {})


def a_call(
    index: int, prompt: Sequence[int], sampled: Sequence[int], parent: int | None = None, version: int = VERSION
) -> Call:
    """A call all of whose tokens are of one version."""
    return make_call(index, prompt, sampled, parent, versions_S=np.full(len(sampled), version, np.int32))


def a_rollout(group: str, index: int, reward: float | None, version: int = VERSION) -> Rollout:
    """Prompt 1 2 3, two sampled tokens and as many more as the index says, a tool's answer 6 7, one more token."""
    sampled = list(range(10, 12 + index))
    first = a_call(0, [1, 2, 3], sampled, None, version)
    second = a_call(1, [1, 2, 3, *sampled, 6, 7], [8], 0, version)
    return make_rollout([first, second], reward, group, index)


def a_step() -> list[Group]:
    """Four groups: rewards of all kinds, a failed rollout, one that ended without a call, one cut by its length."""
    rewards = {
        "a": (1.0, 0.0, 0.5, 0.25),
        "b": (0.0, 0.0, 1.0, None),
        "c": (1.0, 1.0, 1.0, 1.0),
        "d": (0.2, 0.9, 0.0, 1.0),
    }
    groups = []
    for task, of_group in rewards.items():
        name = f"step-0/{task}"
        rollouts = [a_rollout(name, index, reward) for index, reward in enumerate(of_group)]
        groups.append(make_group(rollouts, name, version=VERSION))
    silent = make_rollout([], 1.0, "step-0/d", 3)
    groups[3] = with_rollout(groups[3], silent)
    return groups


def with_rollout(group: Group, rollout: Rollout) -> Group:
    """The group with this rollout in its place."""
    return replace(group, rollouts=tuple(rollout if one.index == rollout.index else one for one in group.rollouts))


def with_calls(rollout: Rollout, **changes: Any) -> Rollout:
    """The rollout with these changes of all its calls."""
    return replace(rollout, calls=tuple(replace(call, **changes) for call in rollout.calls))


def draw(groups: Sequence[Group], run: ResolvedConfig) -> tuple[Batch, ...]:
    """The batches that the run makes of these groups."""
    return draw_batches(groups, algorithm_of(run.config), run.config.trainer.num_minibatches)


def online(
    groups: Sequence[Group], batches: Sequence[Batch], run: ResolvedConfig, version: int = VERSION
) -> tuple[Check, ...]:
    """What the audit says before the update."""
    return audit(groups, delivery(batches), Rules.of(run.config), version=version)


def leave(
    run_dir: Path, groups: Sequence[Group], batches: Sequence[Batch], run: ResolvedConfig, *, stored: bool = True
) -> Path:
    """The directory of a run that trained one step on these batches. Not `stored`: by an Sharpen that did not store
    what the trainer receives."""
    run_dir.mkdir()
    write_resolved(run_dir / "resolved.json", run)
    experiences = [one for batch in batches for one in batch.experiences]
    num_tokens = float(sum(one.loss_mask_T.sum() for one in experiences))
    metrics = {"batch/loss_tokens": num_tokens, "trainer/logprob_gap_tokens": num_tokens}
    metrics |= {"trainer/logprob_gap_mean": 0.0, "trainer/logprob_gap_max": 0.0, "trainer/logprob_gap_kl": 0.0}
    with Journal(run_dir / "run.db") as journal:
        journal.begin(0, VERSION)
        for group in groups:
            journal.add(group)
        journal.add_checks(1, online(groups, batches, run))
        journal.add_step(1, VERSION + MINIBATCHES, metrics, experiences, delivery(batches) if stored else None)
    return run_dir


FAILED = {"outcome": Outcome.TIMEOUT, "reward": None}
