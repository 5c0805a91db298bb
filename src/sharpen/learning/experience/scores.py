"""Collects the scores of rollouts, from which advantages are computed.

In: rollouts that take part, with the rewards to train on. Out: `Scores`. A step reward belongs to the trained call that
earned it, or to the last trained call before; step rewards before the first trained call only count in the episode's
return. A state is identified by the name that the workflow gave it, or else by what the environment showed.

Shape suffixes: R rollouts, C trained calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from sharpen.learning.algorithm.returns import Scores
from sharpen.types import Call, Rollout


def scores_of(rollouts: Sequence[Rollout], baselines: Mapping[str, float | None]) -> Scores:
    """Return the scores of rollouts; `baselines` are the greedy rollouts' rewards by group id."""
    trained = [[call for call in rollout.calls if call.trainable] for rollout in rollouts]
    calls = [(rollout, call) for rollout, own in zip(rollouts, trained, strict=True) for call in own]
    groups = {id_: number for number, id_ in enumerate(dict.fromkeys(rollout.group_id for rollout in rollouts))}
    states: dict[str, int] = {}
    return Scores(
        rewards_R=np.array([rollout.reward for rollout in rollouts], np.float64),
        returns_R=np.array([_return(rollout) for rollout in rollouts], np.float64),
        groups_R=np.array([groups[rollout.group_id] for rollout in rollouts], np.int64),
        rollouts_C=np.repeat(np.arange(len(rollouts)), [len(own) for own in trained]),
        step_rewards_C=np.array(
            [reward for pair in zip(rollouts, trained, strict=True) for reward in _step_rewards(*pair)], np.float64
        ),
        call_rewards_C=np.array([rollout.call_rewards.get(call.index, np.nan) for rollout, call in calls], np.float64),
        states_C=np.array([states.setdefault(state_of(*pair), len(states)) for pair in calls], np.int64),
        num_tokens_C=np.array([len(call.sampled_ids_S) for _, call in calls], np.int64),
        baselines_R=np.array([_number(baselines.get(rollout.group_id)) for rollout in rollouts], np.float64),
    )


def state_of(rollout: Rollout, call: Call) -> str:
    """Return a key for the state in which a call was made: the name that the workflow gave it, or else the messages
    since the model's last answer. Only named states can be the same in different groups."""
    name = rollout.states.get(call.index)
    if name is not None:
        return f"told {name}"
    return f"shown in {rollout.group_id} {json.dumps(shown(call.messages), sort_keys=True, default=repr)}"


def shown(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str | None, Any]]:
    """Return role, tool name and content of the messages after the model's last answer, without `system` and
    `developer` messages. Tools are identified by name, since the ids of tool calls differ between rollouts."""
    end = len(messages)
    while end and messages[end - 1].get("role") == "assistant":  # a prefix of the requested answer
        end -= 1
    start = end
    while start and messages[start - 1].get("role") != "assistant":
        start -= 1
    tool_calls = messages[start - 1].get("tool_calls") if start else None
    names = {call.get("id"): call.get("function", {}).get("name") for call in tool_calls or ()}
    return [
        (str(message.get("role")), names.get(message.get("tool_call_id")), _text(message.get("content")))
        for message in messages[start:end]
        if message.get("role") not in ("system", "developer")
    ]


def _text(content: Any) -> Any:
    """Join a content of several parts if all of them are text; return others unchanged."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text")) for part in content)
    return content


def _return(rollout: Rollout) -> float:
    return sum(rollout.step_rewards.values()) if rollout.step_rewards else _number(rollout.reward)


def _step_rewards(rollout: Rollout, trained: Sequence[Call]) -> list[float]:
    """Return the sum of step rewards from each trained call to the next; NaN if the rollout has no step rewards."""
    if not rollout.step_rewards:
        return [np.nan] * len(trained)
    bounds = [*(call.index for call in trained), len(rollout.calls)]
    return [sum(rollout.step_rewards.get(index, 0.0) for index in range(start, end)) for start, end in pairwise(bounds)]


def _number(reward: float | None) -> float:
    return np.nan if reward is None else reward
