"""One attempt that made all rollouts of a group, cut into the rollouts: whose each of its calls is.

In: the attempt's recorded calls, and how each rollout ended. Out: the calls of each rollout, numbered anew.

What the workflow gave back says whose a call is, and so does a call that goes on from another one. Of what it says
nothing about (it failed), the k-th choice of a request is the k-th rollout's, and anything else the first one's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from sharpen.rollout.attempt import Ending
from sharpen.rollout.in_process import Attempt
from sharpen.types import Call

V = TypeVar("V")


def cut(calls: Sequence[Call], endings: Sequence[Ending]) -> list[tuple[tuple[Call, ...], Ending]]:
    """The calls of each rollout, each with its own indices from 0, and its ending, which names them by these."""
    owners = _owners(calls, endings)
    found = []
    for number, ending in enumerate(endings):
        places = {
            call.index: place for place, call in enumerate(call for call in calls if owners[call.index] == number)
        }
        own = tuple(_numbered(call, calls, places) for call in calls if call.index in places)
        found.append((own, _renamed(ending, places)))
    return found


def share(came: Attempt, calls: tuple[Call, ...], ending: Ending, size: int) -> Attempt:
    """One rollout's part of an attempt that made `size` of them: of what was counted, the mean."""
    return Attempt(
        ending=ending,
        calls=calls,
        noticed={name: count / size for name, count in came.noticed.items()},
        seconds=came.seconds,
        num_answers=0 if came.calls else came.num_answers and -(-came.num_answers // size),
    )


def _owners(calls: Sequence[Call], endings: Sequence[Ending]) -> dict[int, int]:
    """The number of the rollout that each call, by its index, is of."""
    owners = {index: number for number, ending in enumerate(endings) for index in ending.calls}
    for call in reversed(calls):
        if call.index in owners and call.parent is not None:
            owners.setdefault(call.parent, owners[call.index])
    for call in calls:
        choice = 0 if call.request is None else call.index - call.request
        owners.setdefault(call.index, choice if choice < len(endings) else 0)
    return owners


def _numbered(call: Call, calls: Sequence[Call], places: Mapping[int, int]) -> Call:
    """The call at its place: its parent is the nearest call before it in its sequence that is of this rollout."""
    parent = call.parent
    while parent is not None and parent not in places:
        parent = calls[parent].parent
    together = [one.index for one in calls if call.request is not None and one.request == call.request]
    kept = [places[index] for index in together if index in places]
    return dataclasses.replace(
        call,
        index=places[call.index],
        parent=None if parent is None else places[parent],
        request=min(kept) if len(kept) > 1 else None,
    )


def _renamed(ending: Ending, places: Mapping[int, int]) -> Ending:
    def renamed(values: Mapping[int, V]) -> dict[int, V]:
        return {places[index]: value for index, value in values.items()}

    return dataclasses.replace(
        ending,
        call_rewards=None if ending.call_rewards is None else renamed(ending.call_rewards),
        step_rewards=renamed(ending.step_rewards),
        states=renamed(ending.states),
    )
