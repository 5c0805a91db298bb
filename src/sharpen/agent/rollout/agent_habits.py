"""Habits of the agent's code that hinder training: its own sampling parameters, cached answers.

In: the groups of the pre-flight check. Out: messages that say what was found and what to do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.agent.rollout.statistics import CACHED, is_flat
from sharpen.config.public import TunerModelConfig
from sharpen.types import Call, Group, Rollout


def own_truncation(groups: Sequence[Group], model: TunerModelConfig) -> str | None:
    """Return a message if the agent sets its own `top_p` or `top_k`, whose tokens cannot be trained on; else None."""
    calls = _sampled_calls(groups)
    values = Counter(
        f"top_p {call.sampling.top_p:g}" if call.sampling.top_p < 1 else f"top_k {call.sampling.top_k}"
        for call in calls
        if not call.sampling.full_support
    )
    if not values:
        return None
    return (
        f"the agent sets {_join_values(values)} itself in {sum(values.values())} of {len(calls)} calls (model.top_p is "
        f"{model.top_p:g}): tokens from a truncated distribution have no probability ratio, and the first step would "
        "fail; remove it from the agent's code, or train without a ratio (raft)"
    )


def own_temperature(groups: Sequence[Group], model: TunerModelConfig) -> str | None:
    """Return a message if the agent sets a temperature other than the run's, with its effect on groups; else None.

    Temperature 0 is reported elsewhere: such calls are not trained at all.
    """
    calls = _sampled_calls(groups)
    values = Counter(
        f"{call.sampling.temperature:g}" for call in calls if call.sampling.temperature != model.temperature
    )
    if not values:
        return None
    lower = max(call.sampling.temperature for call in calls) < model.temperature
    effect = "answers to one task differ little, and equal rewards teach nothing" if lower else "it is used"
    return (
        f"the agent sets temperature {_join_values(values)} itself in {sum(values.values())} of {len(calls)} calls, "
        f"where model.temperature is {model.temperature:g}: {effect} ({sum(map(is_flat, groups))} of {len(groups)} "
        "groups have equal rewards); remove it from the agent's code (LlamaIndex sends 0.1 by default), or set "
        "model.temperature to it"
    )


def cached_answers(groups: Sequence[Group]) -> str | None:
    """Return a message if rollouts' histories contain answers that a sibling received; else None.

    A cache served them again, so that each rollout of the group begins with the same answer.
    """
    cached = [rollout for group in groups for rollout in _with_sibling_answers(group)]
    if not cached:
        return None
    num_rollouts = sum(len(group.rollouts) for group in groups)
    return (
        f"{len(cached)} of {num_rollouts} rollouts (the first: {cached[0].id}) continue from an answer given to "
        f"another rollout of their task: {CACHED}"
    )


def _with_sibling_answers(group: Group) -> list[Rollout]:
    """Return the rollouts whose first call continues from an answer of a sibling.

    A message that precedes the first call of every rollout is an example, not an answer.
    """
    received = {rollout.id: {_content_key(call.response) for call in rollout.answers} for rollout in group.rollouts}
    before = {
        rollout.id: {
            _content_key(message) for message in rollout.answers[0].messages if message.get("role") == "assistant"
        }
        for rollout in group.rollouts
        if rollout.answers
    }
    examples = set.intersection(*before.values()) if before else set[str]()
    matches = []
    for rollout in group.rollouts:
        siblings = set[str]().union(*(answers for id_, answers in received.items() if id_ != rollout.id))
        if (before.get(rollout.id, set()) - examples) & siblings:
            matches.append(rollout)
    return matches


def _content_key(message: Mapping[str, Any]) -> str:
    """Return an assistant message's text and tool calls, without their ids, as a comparable string."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("content"), calls], sort_keys=True, default=repr)


def _sampled_calls(groups: Sequence[Group]) -> list[Call]:
    """Return the calls that the agent received, except greedy ones."""
    calls = [call for group in groups for rollout in group.rollouts for call in rollout.answers]
    return [call for call in calls if call.sampling.temperature > 0]


def _join_values(values: Counter[str]) -> str:
    return " and ".join(value for value, _ in values.most_common())
