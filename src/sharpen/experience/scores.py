"""The scores of rollouts: what advantages are computed from, read off the records.

In: rollouts that take part, with the rewards to train on. Out: `Scores`. Rewards of steps go to the trained call that
earned them, or the last one before it; those before the first trained call count in the episode's return alone. States
are told apart by what the owner said, else by what the environment showed.

Shape suffixes: R rollouts, C trained calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from sharpen.algorithm.returns import Scores
from sharpen.types import Call, Rollout


def scores_of(rollouts: Sequence[Rollout], baselines: Mapping[str, float | None]) -> Scores:
    """The scores of these rollouts; `baselines` are the greedy rollouts' rewards, by group."""
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
            [reward for pair in zip(rollouts, trained, strict=True) for reward in _from_call_to_call(*pair)], np.float64
        ),
        call_rewards_C=np.array([rollout.call_rewards.get(call.index, np.nan) for rollout, call in calls], np.float64),
        states_C=np.array([states.setdefault(state_of(*pair), len(states)) for pair in calls], np.int64),
        num_tokens_C=np.array([len(call.sampled_ids_S) for _, call in calls], np.int64),
        baselines_R=np.array([_number(baselines.get(rollout.group_id)) for rollout in rollouts], np.float64),
    )


def state_of(rollout: Rollout, call: Call) -> str:
    """What tells the states apart in which calls were made: what the owner said, else what the environment showed
    since the model last spoke. Only what was said is the same over groups."""
    told = rollout.states.get(call.index)
    if told is not None:
        return f"told {told}"
    return f"shown in {rollout.group_id} {json.dumps(shown(call.messages), sort_keys=True, default=repr)}"


def shown(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str | None, Any]]:
    """Role, tool and content of the messages behind the last answer of the model, without those that the agent's owner
    wrote (`system`, `developer`). A tool has its name, not the id of the call, which differs in each rollout."""
    end = len(messages)
    while end and messages[end - 1].get("role") == "assistant":  # the beginning of the answer that is asked for
        end -= 1
    start = end
    while start and messages[start - 1].get("role") != "assistant":
        start -= 1
    asked = messages[start - 1].get("tool_calls") if start else None
    names = {call.get("id"): call.get("function", {}).get("name") for call in asked or ()}
    return [
        (str(message.get("role")), names.get(message.get("tool_call_id")), _text(message.get("content")))
        for message in messages[start:end]
        if message.get("role") not in ("system", "developer")
    ]


def _text(content: Any) -> Any:
    """A content in parts as the text it is, if it is text alone."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text")) for part in content)
    return content


def _return(rollout: Rollout) -> float:
    return sum(rollout.step_rewards.values()) if rollout.step_rewards else _number(rollout.reward)


def _from_call_to_call(rollout: Rollout, trained: Sequence[Call]) -> list[float]:
    """The rewards of steps from each trained call to the next; NaN without any."""
    if not rollout.step_rewards:
        return [np.nan] * len(trained)
    bounds = [*(call.index for call in trained), len(rollout.calls)]
    return [sum(rollout.step_rewards.get(index, 0.0) for index in range(start, end)) for start, end in pairwise(bounds)]


def _number(reward: float | None) -> float:
    return np.nan if reward is None else reward
