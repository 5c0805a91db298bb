"""Divides an attempt that made several rollouts into one attempt for each rollout.

In: the attempt, with its recorded calls and the endings of the rollouts: all those of a group, or one and what it
answered to other questions (`Ending.beside`). Out: an `Attempt` for each rollout, whose calls are numbered from 0. And
the groups of the rollouts that answered other questions.

A call belongs to the rollout that claims it, or that claims a call which continues it. Other calls (or all of them, if
the attempt failed): choice k of a request belongs to rollout k, everything else to the first rollout.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from sharpen.agent.rollout.ending import Ending
from sharpen.agent.rollout.in_process import Attempt
from sharpen.types import Call, Group, Rollout

V = TypeVar("V")
Part = tuple[int, str]
"""A rollout of an attempt: its number, and the name of the other question that it answers (`""` for the task)."""


def divide(attempt: Attempt, group_size: int) -> list[Attempt]:
    """Return the attempt of each rollout. Its counts are the mean over the rollouts."""
    calls, members = attempt.calls, attempt.ending.members or (attempt.ending,) * group_size
    endings = {(number, ""): ending for number, ending in enumerate(members)}
    endings |= {(number, name): part for number, one in enumerate(members) for name, part in one.beside.items()}
    owners = _owners(calls, endings)
    answers = attempt.num_answers if attempt.num_answers is None else -(-attempt.num_answers // group_size)
    counts = {name: count / group_size for name, count in attempt.counts.items()}

    def part(place: Part) -> Attempt:
        own = [call for call in calls if owners[call.index] == place]
        indices = {call.index: index for index, call in enumerate(own)}
        return Attempt(
            ending=_renumber_ending(endings[place], indices),
            calls=tuple(_renumber(call, calls, indices) for call in own),
            counts={} if place[1] else counts,
            seconds=attempt.seconds,
            started=attempt.started,
            num_answers=0 if calls or place[1] else answers,
        )

    return [
        dataclasses.replace(part((number, "")), beside={name: part((number, name)) for name in ending.beside})
        for number, ending in enumerate(members)
    ]


def side_groups(group: Group, beside: Sequence[Mapping[str, Rollout]]) -> Group:
    """Return the group with those at its side: for each other question, the rollouts that answered it, in order.

    `beside` has for each rollout of the group what it answered to other questions.
    """
    by_name: dict[str, list[Rollout]] = defaultdict(list)
    for named in beside:
        for name, rollout in named.items():
            place = len(by_name[name])
            by_name[name].append(dataclasses.replace(rollout, id=f"{rollout.group_id}/{place}", index=place))
    side = (
        dataclasses.replace(group, id=rollouts[0].group_id, rollouts=tuple(rollouts), attempts=(), baseline=None)
        for rollouts in by_name.values()
    )
    return dataclasses.replace(group, side=tuple(dataclasses.replace(one, beside=group.id) for one in side))


def _owners(calls: Sequence[Call], endings: Mapping[Part, Ending]) -> dict[int, Part]:
    """Return the rollout that each call belongs to, by the call's index."""
    owners = {index: place for place, ending in endings.items() for index in ending.calls}
    for call in reversed(calls):
        if call.index in owners and call.parent is not None:
            owners.setdefault(call.parent, owners[call.index])
    for call in calls:
        choice = 0 if call.request is None else call.index - call.request
        owners.setdefault(call.index, (choice if (choice, "") in endings else 0, ""))
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
        return {indices[index]: value for index, value in values.items() if index in indices}  # else not recorded

    return dataclasses.replace(
        ending,
        call_rewards=None if ending.call_rewards is None else renumbered(ending.call_rewards),
        trained=None if ending.trained is None else frozenset(indices[one] for one in ending.trained if one in indices),
        step_rewards=renumbered(ending.step_rewards),
        states=renumbered(ending.states),
    )
