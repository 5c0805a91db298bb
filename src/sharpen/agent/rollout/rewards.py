"""Rewards and other numbers that user code returns.

In: anything. Out: a float, or what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.agent.rollout.retries import Ending
from sharpen.errors import ConfigError
from sharpen.types import Call, Outcome

MAX_REWARD = 1e15
"""The largest reward, up or down: the sums of squares of a batch must be numbers of float32."""


def as_number(value: Any) -> float | None:
    """Return a Python or numpy number, a boolean, or a zero-dimensional array or tensor as a float; else None."""
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # an integer
            return math.inf if operator.gt(value, 0) else -math.inf
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return as_number(value.item())
    return None


def problem_of_reward(number: float | None) -> str | None:
    """Say what a reward must be that this number (None: something else) is not; None if it is one."""
    if number is None:
        return "a number"
    if not math.isfinite(number):
        return "a finite number"
    return None if abs(number) <= MAX_REWARD else f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"


# Rewards and training of single agents, for a workflow in which several of them use the model.
#
# In: what the workflow says of its agents, the ending of its rollout, the calls. Out: the ending, in which each agent
# with a reward of its own is a rollout beside (`Ending.beside`): its calls are compared with those of the same agent.


def with_team(ending: Ending, output: Any, calls: Sequence[Call]) -> Ending:
    """Return the ending of a rollout with what its workflow's output says of agents, if anything.

    An agent that made no call has no rollout. Raises `ConfigError` for a name that no agent could have, a call that
    there is not, or a reward that is no finite number.
    """
    rewards, train = getattr(output, "call_rewards", None), getattr(output, "train", None)
    if not isinstance(rewards, Mapping) or any(isinstance(name, int) for name in rewards):
        rewards = {}  # by the calls' indices: an ending has these already
    if ending.outcome != Outcome.OK or (not rewards and train is None):
        return ending
    trained = None if train is None else _trained(train, calls)
    beside = {}
    for name, reward in rewards.items():
        if (problem := problem_of_reward(reward)) is not None:
            raise ConfigError(f"WorkflowOutput.call_rewards: the reward of agent {name!r} is {reward}, not {problem}")
        if own := tuple(call.index for call in calls if call.agent == name):
            beside[name] = Ending(outcome=Outcome.OK, reward=float(reward), calls=own, trained=trained)
    rest = tuple(call.index for call in calls if call.agent not in beside)
    return dataclasses.replace(ending, beside={**ending.beside, **beside}, calls=rest, trained=trained)


def _trained(train: Sequence[str | int], calls: Sequence[Call]) -> frozenset[int]:
    """Return the indices of the calls that train."""
    indices = {one for one in train if isinstance(one, int)}
    unknown = sorted(indices - {call.index for call in calls})
    if unknown:
        raise ConfigError(f"WorkflowOutput.train names call {unknown[0]}, but the rollout has {len(calls)} calls")
    names = {one for one in train if isinstance(one, str)}
    return frozenset(indices | {call.index for call in calls if call.agent in names})
