"""Runs a judge over stored rollouts.

In: the groups of a journal, a judge. Out: a `Score` for each rollout that has a reward: the recorded one and the new
one. What the workflow returned is not stored, so the judge gets the text of the last answer.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from sharpen.agent.rollout.signature import name_of, needed_arguments
from sharpen.agent.transcript import TRIMMED, answer_text
from sharpen.errors import ConfigError
from sharpen.types import Group, Rollout

AT_ONCE = 16
"""Rollouts judged at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A rollout's rewards. `new` is None if the judge failed, and `error` says how; or if the rollout is `trimmed`, so
    that there is no answer to judge."""

    rollout: str
    group: str
    task: str
    old: float
    new: float | None
    error: str = ""
    trimmed: bool = False


def check_judge(judge: Callable[..., Any]) -> None:
    """Raise `ConfigError` unless the judge needs nothing but task and response."""
    if needed := needed_arguments(judge):
        raise ConfigError(
            f"judge `{name_of(judge)}` takes {', '.join(sorted(needed))}, which only a run has: give rescore a judge "
            "that takes task and response"
        )


def score(groups: Iterable[Group], judge: Callable[..., Any]) -> list[Score]:
    """Judge every rollout that has a reward, some at once."""

    async def all_scores() -> list[Score]:
        return [found async for found in _scores(groups, judge)]

    return asyncio.run(all_scores())


async def _scores(groups: Iterable[Group], judge: Callable[..., Any]) -> AsyncIterator[Score]:
    waiting: list[tuple[Group, Rollout]] = []
    for group in groups:
        waiting += [(group, rollout) for rollout in group.rollouts if rollout.reward is not None]
        while len(waiting) >= AT_ONCE:
            batch, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            for found in await asyncio.gather(*(_score(*one, judge) for one in batch)):
                yield found
    for found in await asyncio.gather(*(_score(*one, judge) for one in waiting)):
        yield found


async def _score(group: Group, rollout: Rollout, judge: Callable[..., Any]) -> Score:
    assert rollout.reward is not None
    if rollout.trimmed:
        score = Score(rollout=rollout.id, group=group.id, task=group.task.id, old=rollout.reward, new=None)
        return replace(score, error=TRIMMED, trimmed=True)
    new, error = None, ""
    try:
        judged = await judge(task=copy.deepcopy(dict(group.task.row)), response=answer_text(rollout))
        new = float(getattr(judged, "reward", judged))
        if not math.isfinite(new):
            new, error = None, f"a reward of {new}"
    except Exception as raised:  # the user's code may raise anything; it is one rollout's failure
        new, error = None, f"{type(raised).__name__}: {raised}"
    return Score(rollout=rollout.id, group=group.id, task=group.task.id, old=rollout.reward, new=new, error=error)
