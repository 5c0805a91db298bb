"""What the agent's own code does to the calls, as far as it is in the way of training: its own sampling, its cache.

In: the groups of the pre-flight check. Out: sentences that say what was seen and what to do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.config.public import TunerModelConfig
from sharpen.rollout.statistics import CACHED, is_flat
from sharpen.types import Call, Group, Rollout


def own_truncation(groups: Sequence[Group], model: TunerModelConfig) -> str | None:
    """A `top_p` or `top_k` of the agent's own, which nothing can be trained on."""
    calls = _sampled(groups)
    found = Counter(
        f"top_p {call.sampling.top_p:g}" if call.sampling.top_p < 1 else f"top_k {call.sampling.top_k}"
        for call in calls
        if not call.sampling.full_support
    )
    if not found:
        return None
    return (
        f"the agent sets {_values(found)} itself in {sum(found.values())} of {len(calls)} calls (model.top_p is "
        f"{model.top_p:g}): tokens that were cut from the distribution cannot be trained on, and the first step would "
        "stop; remove it from the agent's code"
    )


def own_temperature(groups: Sequence[Group], model: TunerModelConfig) -> str | None:
    """A temperature of the agent's own other than the run's (0 is another matter: nothing trains), and what it does to
    groups."""
    calls = _sampled(groups)
    found = Counter(
        f"{call.sampling.temperature:g}" for call in calls if call.sampling.temperature != model.temperature
    )
    if not found:
        return None
    lower = max(call.sampling.temperature for call in calls) < model.temperature
    effect = "answers to one task differ little, and groups of one reward teach nothing" if lower else "that one holds"
    return (
        f"the agent sets temperature {_values(found)} itself in {sum(found.values())} of {len(calls)} calls, where "
        f"model.temperature is {model.temperature:g}: {effect} ({sum(map(is_flat, groups))} of {len(groups)} groups "
        "have one reward); remove it from the agent's code (LlamaIndex sends 0.1 unless told otherwise), or set "
        "model.temperature to it"
    )


def cached_answers(groups: Sequence[Group]) -> str | None:
    """Answers that stand in a rollout's history though another rollout of its task was given them: a cache served them
    again, and each rollout of the group begins with the same answer."""
    served = [rollout for group in groups for rollout in _served_from_a_sibling(group)]
    if not served:
        return None
    num_rollouts = sum(len(group.rollouts) for group in groups)
    return (
        f"{len(served)} of {num_rollouts} rollouts (the first: {served[0].id}) go on from an answer that another "
        f"rollout of their task was given: {CACHED}"
    )


def _served_from_a_sibling(group: Group) -> list[Rollout]:
    """Rollouts whose first call goes on from what a sibling was answered; what stands before every rollout's first call
    is an example, not an answer."""
    given = {rollout.id: {_said(call.response) for call in rollout.answers} for rollout in group.rollouts}
    before = {
        rollout.id: {_said(message) for message in rollout.answers[0].messages if message.get("role") == "assistant"}
        for rollout in group.rollouts
        if rollout.answers
    }
    examples = set.intersection(*before.values()) if before else set[str]()
    found = []
    for rollout in group.rollouts:
        siblings = set[str]().union(*(answers for id_, answers in given.items() if id_ != rollout.id))
        if (before.get(rollout.id, set()) - examples) & siblings:
            found.append(rollout)
    return found


def _said(message: Mapping[str, Any]) -> str:
    """An assistant's message as it can be told from others: its text, and the calls of tools without their ids."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("content"), calls], sort_keys=True, default=repr)


def _sampled(groups: Sequence[Group]) -> list[Call]:
    """The calls that the agent was handed, but the greedy ones."""
    calls = [call for group in groups for rollout in group.rollouts for call in rollout.answers]
    return [call for call in calls if call.sampling.temperature > 0]


def _values(found: Counter[str]) -> str:
    return " and ".join(value for value, _ in found.most_common())
