"""Asks a judge for each marked answer.

In: a judge, marks, the auxiliary models that it may call. Out: its rewards for each answer, or how it failed. Verdicts
that a judge of ours has kept are not taken: it is asked.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sharpen.agent.judges.model import asking_afresh, close_clients
from sharpen.agent.judges.several import judgement
from sharpen.agent.rollout.signature import name_of, needed_arguments
from sharpen.errors import ConfigError
from sharpen.evidence.judges.marks import Mark

AT_ONCE = 16
"""Answers judged at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a judge said of a marked answer: a reward each time it was asked, none of them if it `error`ed once."""

    mark: Mark
    rewards: tuple[float, ...] = ()
    error: str = ""


def ask_judge(
    judge: Callable[..., Any],
    marks: Sequence[Mark],
    *,
    times: int = 1,
    auxiliary_models: Mapping[str, Any] | None = None,
) -> list[Judged]:
    """Ask a judge `times` for each answer, some at once. Raises `ConfigError` for what no answer could change: a wrong
    signature, an argument or a model that is not there."""
    given = {"auxiliary_models"} if auxiliary_models is not None else set()
    if missing := sorted(needed_arguments(judge) - given):
        raise ConfigError(
            f"judge `{name_of(judge)}` takes {', '.join(missing)}, which is not here: give the run's configuration "
            "(--config) for auxiliary_models, and a default to any other argument"
        )

    async def all_of_them() -> list[Judged]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(mark: Mark) -> Judged:
            async with slots:
                return await _judged(judge, mark, times, auxiliary_models)

        try:
            with asking_afresh():
                return list(await asyncio.gather(*map(one, marks)))
        finally:
            await close_clients()

    with ThreadPoolExecutor(1) as thread:  # whose event loop is its own: a notebook's is running
        return thread.submit(asyncio.run, all_of_them()).result()


async def _judged(
    judge: Callable[..., Any], mark: Mark, times: int, auxiliary_models: Mapping[str, Any] | None
) -> Judged:
    rewards = []
    try:
        for _ in range(times):
            row = copy.deepcopy(dict(mark.answer.task))
            reward, _metrics = await judgement(judge, row, mark.answer.text, auxiliary_models)
            rewards.append(reward)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything; it is one answer's failure
        return Judged(mark=mark, error=f"{type(error).__name__}: {error}")
    return Judged(mark=mark, rewards=tuple(rewards))
