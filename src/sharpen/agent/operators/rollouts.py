"""The built-in operators on rollouts.

In: the groups of a step. Out: the same groups, with other rewards or with rollouts dropped (`operators.changes`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import pstdev
from typing import Any

from sharpen.agent.operators.changes import drop, with_reward
from sharpen.errors import ConfigError
from sharpen.types import Group, Rollout

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
        found = _metric(rollout, metric_key)
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
        value = _metric(rollout, key)
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


def _metric(rollout: Rollout, key: str) -> float | None:
    """A metric by its own name, or under the name of who measured it (`judge/right`)."""
    for name in (key, f"judge/{key}", f"workflow/{key}"):
        if name in rollout.metrics:
            return rollout.metrics[name]
    return None
