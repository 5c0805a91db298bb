"""Opens a candidate's models for an attempt, and runs attempts whose models are not served here.

In: the arguments of a candidate. Out: an opener for the rollout runner, whose model is a `Trial`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.ending import Ending
from sharpen.agent.rollout.in_process import Attempt, AttemptRequest, OpenModels
from sharpen.agent.rollout.models import RolloutModels
from sharpen.beyond.trials.agent import Trial
from sharpen.beyond.trials.usage import Usage, counted, is_countable
from sharpen.types import Call, Outcome


class OwnModel:
    """Access to a model that is not served here; implements `rollout.models.Access`. Its calls are not recorded."""

    failure = failure_reason = exhausted = None
    cut = False

    def __init__(self, trial: Trial) -> None:
        self.model = trial
        self.counts: Mapping[str, float] = {}

    @property
    def num_answers(self) -> int | None:
        """The number of answers that the agent received; None if unknown."""
        used = self.model.usage()
        return None if used is None else used.num_answers

    def allow(self, num_rollouts: int) -> None:
        """Its calls are not limited."""

    def close(self) -> tuple[Call, ...]:
        """Return no calls: none was recorded. Access cannot be revoked."""
        return ()

    def discard(self) -> None:
        """Do nothing: nothing was kept."""


def with_own_models(arguments: Mapping[str, Any]) -> OpenModels:
    """Return an opener that passes `arguments` unchanged, except that a model of AgentScope is a copy that counts."""

    def opens(rollout_id: str, noise_seed: int) -> RolloutModels:
        model = arguments.get("model")
        if not is_countable(model):
            return RolloutModels(OwnModel(Trial(arguments=arguments, usage=lambda: None)))
        usage = Usage()
        trial = Trial(arguments={**arguments, "model": counted(model, usage)}, usage=lambda: usage)
        return RolloutModels(OwnModel(trial))

    return opens


def with_served_model(open_models: OpenModels, arguments: Mapping[str, Any]) -> OpenModels:
    """Return an opener that passes `arguments`, and as `model` the one that `open_models` opens."""

    def opens(rollout_id: str, noise_seed: int) -> RolloutModels:
        models = open_models(rollout_id, noise_seed)
        models.model = Trial(
            arguments={**arguments, "model": models.model}, usage=lambda: usage_of_calls(models.close())
        )
        return models

    return opens


def usage_of_calls(calls: tuple[Call, ...]) -> Usage:
    """Return the tokens of the calls whose answers the agent received. Each call counts its whole prompt."""
    delivered = [call for call in calls if call.delivered]
    return Usage(
        input_tokens=sum(len(call.prompt_ids_P) for call in delivered),
        output_tokens=sum(len(call.sampled_ids_S) for call in delivered),
        num_answers=len(delivered),
    )


class OnCallersLoop:
    """Runs attempts on the caller's event loop; implements `rollout.in_process.AttemptRunner`.

    Connections and locks of the user's models stay on that loop. Code that blocks it blocks all attempts.
    """

    def __init__(self, functions: UserFunctions, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._loop = loop

    async def run(self, request: AttemptRequest) -> Attempt:
        """See `AttemptRunner.run`."""
        assert callable(request.opener)
        began, started = time.monotonic(), time.time()
        models = request.opener(request.rollout_id, request.noise_seed)
        attempt = asyncio.run_coroutine_threadsafe(self._functions.attempt(request.task, models), self._loop)
        ended = asyncio.wrap_future(attempt)
        try:
            await asyncio.wait([ended], timeout=self._timeout_s)
        finally:  # also if this coroutine is cancelled
            if not ended.done():
                attempt.cancel()
        if not attempt.cancelled():
            ending = attempt.result()
        else:
            ending = Ending(outcome=Outcome.TIMEOUT, error=f"no result within the time limit of {self._timeout_s:g} s")
        return Attempt(
            ending=ending,
            calls=models.end(),
            counts=models.counts,
            seconds=time.monotonic() - began,
            started=started,
            num_answers=models.policy.num_answers,
        )

    def close(self) -> None:
        """Do nothing: the loop belongs to the caller."""
