"""The built-in operators on rollouts.

In: the groups of a step. Out: the same groups, with other rewards or with rollouts dropped (`drop`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import pstdev
from typing import Any

from sharpen.errors import ConfigError, OperatorError
from sharpen.types import Group, Outcome, Rollout, metric_named

# What an operator may do to rollouts, and the check that it did nothing else.
#
# In: rollouts. Out: the same ones with another reward, or dropped. Calls, tokens and ids are the record of what
# happened: no operator changes them.

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


def judge_failed(rollout: Rollout, reason: str) -> Rollout:
    """End a rollout as a failure of the judge that an operator asked: without a reward, and never trained."""
    if not rollout.scored:
        return rollout
    return replace(rollout, outcome=Outcome.JUDGE_ERROR, reward=None, error=reason)


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
    failed = new.outcome == Outcome.JUDGE_ERROR and new.reward is None
    if new.outcome not in (old.outcome, Outcome.FILTERED) and not failed:
        raise OperatorError(f"operator {name} changed the outcome of rollout {old.id!r} to {new.outcome.value!r}")


log = logging.getLogger("sharpen.operators")

_TERMS: Mapping[str, Callable[[float, float], float]] = {
    "ADD": lambda reward, term: reward + term,
    "SUB": lambda reward, term: reward - term,
    "MUL": lambda reward, term: reward * term,
    "DIV": lambda reward, term: reward / term if term else reward,
}


def reward_filter(groups: Sequence[Group], threshold: float = 0.0) -> list[Group]:
    """Drop rollouts whose reward is below `threshold`."""
    reason = f"reward below {threshold:g}"
    return _each(groups, lambda rollout: drop(rollout, reason) if _reward(rollout) < threshold else rollout)


def reward_std_filter(groups: Sequence[Group], threshold: float = 0.0) -> list[Group]:
    """Drop groups of one rollout, and groups whose rewards have a standard deviation (population) of at most
    `threshold`."""
    return [
        group
        for group in groups
        if len(group.scored) > 1 and pstdev([_reward(rollout) for rollout in group.scored]) > threshold
    ]


def dapo_dynamic_sampling(
    groups: Sequence[Group], metric_key: str = "accuracy", correct_threshold: float = 0.0
) -> list[Group]:
    """Drop groups in which every rollout is right, or none: right is one whose metric `metric_key`, or reward where it
    has no such metric, is above `correct_threshold`. Source: DAPO, arXiv 2503.14476, section 3.2."""

    def right(rollout: Rollout) -> bool:
        found = metric_named(rollout.metrics, metric_key)
        return (_reward(rollout) if found is None else found) > correct_threshold

    return [group for group in groups if len({right(rollout) for rollout in group.scored}) > 1]


def reward_shaping_mapper(
    groups: Sequence[Group], reward_shaping_configs: Sequence[Mapping[str, Any]] = ()
) -> list[Group]:
    """Change rewards by what workflow and judge measured: each of `reward_shaping_configs` names a metric
    (`stats_key`), an operation (`op_type`: ADD, SUB, MUL, DIV) and a `weight` of the metric. A rollout without the
    metric keeps its reward. Raises `ConfigError` for an unknown operation."""
    for config in reward_shaping_configs:
        groups = _shaped(groups, config)
    return list(groups)


def invalid_reward_filter(groups: Sequence[Group]) -> list[Group]:
    """Drop rollouts without a reward, which never train here anyway where rewards are needed."""
    return _each(groups, lambda rollout: drop(rollout, "no reward") if rollout.reward is None else rollout)


def pass_rate_calculator(groups: Sequence[Group]) -> list[Group]:
    """Change nothing: the pass rate of each task is measured in every run, and `sampling.order: difficulty` goes by
    it."""
    return list(groups)


def _shaped(groups: Sequence[Group], config: Mapping[str, Any]) -> list[Group]:
    known = {"stats_key", "op_type", "weight"}
    operation, weight = config.get("op_type", "ADD"), config.get("weight", 1.0)
    key: Any = config.get("stats_key")
    valid = isinstance(key, str) and operation in _TERMS and isinstance(weight, int | float)
    if not valid or config.keys() - known:
        raise ConfigError(
            f"reward_shaping_configs has {dict(config)}: give stats_key (a metric), op_type ({', '.join(_TERMS)}) and "
            "weight (a number)"
        )
    apply, found = _TERMS[str(operation)], 0

    def shaped(rollout: Rollout) -> Rollout:
        nonlocal found
        value = metric_named(rollout.metrics, key)
        if value is None or rollout.reward is None:
            return rollout
        found += 1
        return with_reward(rollout, apply(rollout.reward, weight * value))

    after = _each(groups, shaped)
    if not found and groups:
        there = sorted({name for group in groups for rollout in group.rollouts for name in rollout.metrics})
        log.warning(
            "reward_shaping_mapper changed nothing: no rollout has the metric %r (there are: %s)", key, ", ".join(there)
        )
    return after


def _each(groups: Sequence[Group], change: Callable[[Rollout], Rollout]) -> list[Group]:
    """Apply `change` to every rollout that takes part."""
    return [
        replace(group, rollouts=tuple(change(one) if one.scored else one for one in group.rollouts)) for group in groups
    ]


def _reward(rollout: Rollout) -> float:
    return math.nan if rollout.reward is None else rollout.reward
