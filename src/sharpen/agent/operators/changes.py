"""What an operator may do to rollouts, and the check that it did nothing else.

In: rollouts. Out: the same ones with another reward, or dropped. Calls, tokens and ids are the record of what happened:
no operator changes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sharpen.errors import OperatorError
from sharpen.types import Group, Outcome, Rollout

BEFORE = "reward_before"
"""The metric that keeps the reward that judge or workflow gave, where an operator changed it."""


def drop(rollout: Rollout, reason: str) -> Rollout:
    """Take a rollout out of training. Its reward stays in the record, and counts in the mean of the step."""
    if not rollout.scored:
        return rollout
    return replace(rollout, outcome=Outcome.FILTERED, error=f"dropped by an operator: {reason}")


def with_reward(rollout: Rollout, reward: float) -> Rollout:
    """Give a rollout another reward; the first one stays as its metric `reward_before`."""
    if rollout.reward is None or reward == rollout.reward:
        return rollout
    metrics = {BEFORE: rollout.reward, **rollout.metrics}
    return replace(rollout, reward=float(reward), metrics=metrics)


def checked(name: str, before: Sequence[Group], after: object) -> list[Group]:
    """Return what the operator `name` made of the groups, in their order; groups that it left out have all their
    rollouts dropped. Raises `OperatorError` if it changed anything but rewards and outcomes."""
    if not isinstance(after, Sequence) or not all(isinstance(group, Group) for group in after):
        raise OperatorError(f"operator {name} must return a list of groups, got {type(after).__name__}")
    by_id = {group.id: group for group in after}
    if unknown := sorted(by_id.keys() - {group.id for group in before}):
        raise OperatorError(f"operator {name} returned a group that it was not given: {unknown[0]!r}")
    return [_checked_group(name, group, by_id.get(group.id)) for group in before]


def _checked_group(name: str, before: Group, after: Group | None) -> Group:
    if after is None:
        return replace(before, rollouts=tuple(drop(rollout, name) for rollout in before.rollouts))
    if len(after.rollouts) != len(before.rollouts):
        raise OperatorError(
            f"operator {name} returned {len(after.rollouts)} rollouts for group {before.id!r}, which has "
            f"{len(before.rollouts)}: drop() a rollout instead of leaving it out"
        )
    for old, new in zip(before.rollouts, after.rollouts, strict=True):
        _check_rollout(name, old, new)
    return replace(before, rollouts=after.rollouts)


def _check_rollout(name: str, old: Rollout, new: Rollout) -> None:
    if (new.id, new.index, new.attempt) != (old.id, old.index, old.attempt) or new.calls is not old.calls:
        raise OperatorError(
            f"operator {name} changed calls, id or order of rollout {old.id!r}: only drop() and with_reward() are its "
            "to do"
        )
    if new.reward is not None and not math.isfinite(new.reward):
        raise OperatorError(f"operator {name} gave rollout {old.id!r} the reward {new.reward}, which is not finite")
    if new.outcome not in (old.outcome, Outcome.FILTERED):
        raise OperatorError(f"operator {name} changed the outcome of rollout {old.id!r} to {new.outcome.value!r}")
