"""Several judges of one answer: their mean, if they agree; and a second judge that only watches.

In: judge functions. Out: one judge. Rewards count as good from 0.5 on where judges are compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from sharpen.agent.rollout.places import describe
from sharpen.agent.rollout.rewards import as_number, problem_of_reward
from sharpen.agent.rollout.signature import judge_arguments
from sharpen.config.public import JudgeOutput
from sharpen.errors import ConfigError, JudgeError

log = logging.getLogger("sharpen.judges")

Judge = Callable[..., Awaitable[Any]]
GOOD_FROM = 0.5
"""The reward from which an answer counts as good."""
SECOND = "second"
"""The metric of the watching judge's reward; `judge/second` in the metrics of a step."""


async def judgement(
    judge: Judge, task: Mapping[str, Any], response: Any, auxiliary_models: Mapping[str, Any] | None
) -> tuple[float, dict[str, float]]:
    """Ask a judge, and return its reward and its metrics. Raises `JudgeError` if the reward is no finite number."""
    takes = "auxiliary_models" in judge_arguments(judge)
    given = {"auxiliary_models": auxiliary_models} if takes and auxiliary_models is not None else {}
    judged = await judge(task=task, response=response, **given)
    reward = as_number(getattr(judged, "reward", judged))
    if (problem := problem_of_reward(reward)) is not None:
        raise JudgeError(f"a judge gave {getattr(judged, 'reward', judged)!r} as reward: it must be {problem}")
    assert reward is not None
    return reward, dict(getattr(judged, "metrics", None) or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralJudges:
    """Asks several judges, by name, at once. The reward is the mean of theirs.

    Metrics: each judge's reward under its name and its own metrics under `<name>/`, and `agreement`, the share of pairs
    of judges that both call the answer good, or both not. Below `least_agreement` the answer is contested: a failure of
    the judge, which never trains. One judge that fails fails all.
    """

    judges: Mapping[str, Judge]
    least_agreement: float = 0.0

    def __post_init__(self) -> None:
        if len(self.judges) < 2:
            raise ConfigError(f"SeveralJudges has {len(self.judges)} judges: give two or more, by name")
        for judge in self.judges.values():
            judge_arguments(judge)

    async def __call__(
        self, task: Mapping[str, Any], response: Any, auxiliary_models: Mapping[str, Any] | None = None
    ) -> JudgeOutput:
        """Judge the response of a task."""
        given = await asyncio.gather(
            *(judgement(judge, task, response, auxiliary_models) for judge in self.judges.values())
        )
        rewards = {name: reward for name, (reward, _) in zip(self.judges, given, strict=True)}
        pairs = list(combinations((reward >= GOOD_FROM for reward in rewards.values()), 2))
        agreement = fmean(a == b for a, b in pairs)
        if agreement < self.least_agreement:
            said = ", ".join(f"{name} {reward:g}" for name, reward in rewards.items())
            raise JudgeError(f"the judges disagree on this answer ({said}): agreement {agreement:.2g}")
        own = {
            f"{name}/{key}": value
            for name, (_, metrics) in zip(self.judges, given, strict=True)
            for key, value in metrics.items()
        }
        return JudgeOutput(reward=fmean(rewards.values()), metrics={**own, **rewards, "agreement": agreement})


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJudge:
    """The reward of `judge`, while `second` judges a `share` of the answers and only watches: its reward is the metric
    `judge/second`, and `sharpen diagnose` says when the reward rises and this does not. A second judge that fails is
    counted (`judge/second_failed`), and costs nothing."""

    judge: Judge
    second: Judge
    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(f"WatchedJudge: share is {self.share}: it must be above 0, and at most 1")
        judge_arguments(self.judge)
        judge_arguments(self.second)

    async def __call__(
        self, task: Mapping[str, Any], response: Any, auxiliary_models: Mapping[str, Any] | None = None
    ) -> JudgeOutput:
        """Judge the response of a task."""
        reward, metrics = await judgement(self.judge, task, response, auxiliary_models)
        if _part(task, response) < self.share:
            try:
                metrics[SECOND], _ = await judgement(self.second, task, response, auxiliary_models)
                metrics["second_failed"] = 0.0
            except ConfigError:
                raise
            except Exception as error:  # it only watches
                log.warning("the second judge failed: %s", describe(error))
                metrics["second_failed"] = 1.0
        return JudgeOutput(reward=reward, metrics=metrics)


def _part(task: Mapping[str, Any], response: Any) -> float:
    """Return a number from 0 to 1 that is the same for the same answer to the same task."""
    content = json.dumps([dict(task), response], sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(content.encode(errors="replace"), digest_size=8).digest()) / 2**64
