"""Batches for the trainer, made of sessions that have ended and have a reward.

In: sessions, in the order of their last use; the algorithm's sizes; how far the trainer is. Out: a batch, or none yet.
The rule: the oldest `group_size` sessions of one task are a group; the first `batch_size` groups that are complete are
a batch. With a group size of 1 every session is a group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sharpen.agent.rollout.refill import StepRollouts
from sharpen.agent.tasks.order import distinct
from sharpen.config.run import RunConfig
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.experience.draw import left_out
from sharpen.placement.exchange.batch import SESSIONS, ExploredBatch
from sharpen.placement.exchange.weights import TrainerNote
from sharpen.serve.visit import Visit
from sharpen.types import Group, id_of_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many groups are a batch, and how many sessions a group."""

    batch_size: int
    group_size: int

    @classmethod
    def of(cls, config: RunConfig) -> Sizes:
        """Those of a configuration."""
        return cls(batch_size=config.algorithm.batch_size, group_size=config.algorithm.group_size)


def too_old(visit: Visit, note: TrainerNote | None, max_staleness: float) -> str:
    """Return why a session cannot be trained any more; empty if it can."""
    if note is None:
        return ""
    if not all(note.leads_here(*weights) for weights in visit.weights):
        return "it was sampled by weights that an interrupted session of the trainer had trained"
    behind = note.version - min((version for _, version in visit.weights), default=note.version)
    return f"it is {behind} policy versions behind (sync.max_staleness)" if behind > max_staleness else ""


def teaches(visit: Visit, *, needs_ratio: bool) -> bool:
    """Whether a session has an answer that may train: none was received, or all were sampled greedily or with top_p or
    top_k, if not."""
    return any(call.trainable for call in visit.rollout("", "", 0, needs_ratio=needs_ratio).calls)


def choose(visits: Sequence[Visit], sizes: Sizes) -> list[list[Visit]] | None:
    """Return the groups of the next batch; None if there are not enough yet."""
    waiting: dict[str, list[Visit]] = {}
    groups = []
    for visit in visits:
        group = waiting.setdefault(visit.task.id, [])
        group.append(visit)
        if len(group) == sizes.group_size:
            groups.append(waiting.pop(visit.task.id))
        if len(groups) == sizes.batch_size:
            return groups
    return None


def make_batch(
    chosen: Sequence[Sequence[Visit]], number: int, algorithm: Algorithm, sizes: Sizes, *, generate_s: float
) -> ExploredBatch:
    """Return the chosen sessions as the batch of step `number`; `generate_s` as in `ExploredBatch`."""
    ids = distinct([id_of_group(number, members[0].task.id) for members in chosen])
    groups = tuple(
        Group(
            id=id_,
            task=members[0].task,
            version=min(one.version for one in members),
            rollouts=tuple(
                one.rollout(f"{id_}/{index}", id_, index, needs_ratio=algorithm.needs_ratio)
                for index, one in enumerate(members)
            ),
        )
        for id_, members in zip(ids, chosen, strict=True)
    )
    visits = [one for members in chosen for one in members]
    oldest, *further = sorted({name for one in visits for name in one.weights}, key=lambda name: name[1])
    began = min(one.opened for one in visits)
    rollouts = StepRollouts(
        groups=groups,
        batch_size=sizes.batch_size,
        usable=sum(left_out(group, algorithm) is None for group in groups),
        refill_rounds=0,
        seconds=time.time() - began,
        refill_s=0.0,
    )
    return ExploredBatch(
        rollouts=rollouts,
        session=oldest[0],
        version=oldest[1],
        order={SESSIONS: [one.id for one in visits]},
        generate_s=generate_s,
        further=tuple(further),
    )
