"""Rollouts of a framework's test as a run would train and certify them.

In: scored groups that the gateway recorded. Out: the directory of a run that trained one step on them, by our own
batches, journal and audit, but without a model; and what `certify` says of it, which reads nothing but that directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sharpen.config.load import ResolvedConfig, resolve, write_resolved
from sharpen.evidence.certificate.audit import audit
from sharpen.evidence.certificate.certificate import Certificate
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.delivery import delivery
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.experience.draw import draw_batches
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_trained
from sharpen.learning.recipe import algorithm_of
from sharpen.types import Group, Rollout

VERSION = 0
"""The policy version of a scripted engine."""


def certified(groups: Sequence[Group], run_dir: Path) -> tuple[Certificate, dict[tuple[str, int], int]]:
    """The certificate of a step that trained these groups; and how many tokens of each call it trained, by the id of
    the rollout and the call's index."""
    run_dir.mkdir(exist_ok=True)
    groups = [replace(group, rollouts=tuple(map(_not_drawn, group.rollouts))) for group in groups]
    run = _settings(groups)
    write_resolved(run_dir / "resolved.json", run)
    batches = draw_batches(groups, algorithm_of(run.config), 1)
    checks = audit(groups, delivery(batches), Rules.of(run.config), version=VERSION)
    experiences = [one for batch in batches for one in batch.experiences]
    num_tokens = float(sum(one.loss_mask_T.sum() for one in experiences))
    metrics = {"batch/loss_tokens": num_tokens, "trainer/logprob_gap_tokens": num_tokens}
    metrics |= {f"trainer/logprob_gap_{name}": 0.0 for name in ("mean", "max", "kl")}
    with Journal(run_dir / "run.db") as journal:
        journal.begin(0, VERSION)
        for group in groups:
            journal.add(group)
        journal.add_checks(1, checks)
        journal.add_step(1, VERSION + 1, metrics, experiences, delivery(batches))
    trained = {(call.rollout_id, call.call): call.num_tokens for call in read_trained(run_dir / "run.db")}
    return certify(run_dir, logprobs=False), trained


def _not_drawn(rollout: Rollout) -> Rollout:
    """A rollout whose calls are not tested for how their tokens were drawn: a script said them."""
    return replace(rollout, calls=tuple(replace(call, seeded=True) for call in rollout.calls))


def _settings(groups: Sequence[Group]) -> ResolvedConfig:
    """REINFORCE, by which every scored rollout trains, whatever the rewards of its group."""
    values = {
        "train_dataset.path": "tasks.jsonl",
        "model.model_path": "toy",
        "model.max_model_len": 1 << 18,
        "algorithm.algorithm_type": "reinforce",
        "algorithm.batch_size": len(groups),
        "algorithm.group_size": len(groups[0].rollouts),
    }
    return resolve(None, values, {})
