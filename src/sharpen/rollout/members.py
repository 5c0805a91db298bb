"""Divides an attempt that made all rollouts of a group into one attempt for each rollout.

In: the attempt, with its recorded calls and the endings of the rollouts. Out: an `Attempt` for each rollout, whose
calls are numbered from 0.

A call belongs to the rollout that claims it, or that claims a call which continues it. Other calls (or all of them, if
the attempt failed): choice k of a request belongs to rollout k, everything else to the first rollout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from sharpen.rollout.attempt import Ending
from sharpen.rollout.in_process import Attempt
from sharpen.types import Call

V = TypeVar("V")


def divide(attempt: Attempt, group_size: int) -> list[Attempt]:
    """Return the attempt of each rollout. Its counts are the mean over the rollouts."""
    calls, endings = attempt.calls, attempt.ending.members or (attempt.ending,) * group_size
    owners = _owners(calls, endings)
    counts = {name: count / group_size for name, count in attempt.counts.items()}
    answers = attempt.num_answers if attempt.num_answers is None else -(-attempt.num_answers // group_size)
    divided = []
    for number, ending in enumerate(endings):
        own = [call for call in calls if owners[call.index] == number]
        indices = {call.index: index for index, call in enumerate(own)}
        divided.append(
            Attempt(
                ending=_renumber_ending(ending, indices),
                calls=tuple(_renumber(call, calls, indices) for call in own),
                counts=counts,
                seconds=attempt.seconds,
                num_answers=0 if calls else answers,
            )
        )
    return divided


def _owners(calls: Sequence[Call], endings: Sequence[Ending]) -> dict[int, int]:
    """Return the number of the rollout that each call belongs to, by the call's index."""
    owners = {index: number for number, ending in enumerate(endings) for index in ending.calls}
    for call in reversed(calls):
        if call.index in owners and call.parent is not None:
            owners.setdefault(call.parent, owners[call.index])
    for call in calls:
        choice = 0 if call.request is None else call.index - call.request
        owners.setdefault(call.index, choice if choice < len(endings) else 0)
    return owners


def _renumber(call: Call, calls: Sequence[Call], indices: Mapping[int, int]) -> Call:
    """Return the call with its new index; its parent is its nearest ancestor among the rollout's own calls."""
    parent = call.parent
    while parent is not None and parent not in indices:
        parent = calls[parent].parent
    choices = [one.index for one in calls if call.request is not None and one.request == call.request]
    own = [indices[index] for index in choices if index in indices]
    return dataclasses.replace(
        call,
        index=indices[call.index],
        parent=None if parent is None else indices[parent],
        request=min(own) if len(own) > 1 else None,
    )


def _renumber_ending(ending: Ending, indices: Mapping[int, int]) -> Ending:
    def renumbered(values: Mapping[int, V]) -> dict[int, V]:
        return {indices[index]: value for index, value in values.items()}

    return dataclasses.replace(
        ending,
        call_rewards=None if ending.call_rewards is None else renumbered(ending.call_rewards),
        step_rewards=renumbered(ending.step_rewards),
        states=renumbered(ending.states),
    )
