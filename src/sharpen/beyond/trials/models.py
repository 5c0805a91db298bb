"""Opens a candidate's models for an attempt, and runs attempts whose models are not served here.

In: the arguments of a candidate. Out: an opener for the rollout runner, whose model is a `Trial`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import Attempt, AttemptRequest, OpenModels
from sharpen.agent.rollout.models import RolloutModels
from sharpen.agent.rollout.retries import Ending
from sharpen.agent.rollout.rewards import as_number
from sharpen.agent.rollout.signature import name_of, optional_arguments
from sharpen.config.public import WorkflowOutput
from sharpen.types import Call, Outcome

# Counts the tokens that a chat model of AgentScope uses, from the usage in its responses.
#
# In: a chat model of AgentScope 1.x or 2.x. Out: a copy that counts; the original does not change.


@dataclass(slots=True, kw_only=True)
class Usage:
    """Tokens used so far, and the number of answers that the agent received. If an answer reports no usage, the token
    counts are unknown (`complete` is false)."""

    input_tokens: int = 0
    output_tokens: int = 0
    num_answers: int = 0
    complete: bool = True

    def add(self, answer: Any) -> None:
        """Count an answer (of a stream, its last chunk)."""
        self.num_answers += 1
        used = getattr(answer, "usage", None)
        sizes = [getattr(used, name, None) for name in ("input_tokens", "output_tokens")]
        if not all(isinstance(size, int) for size in sizes):
            self.complete = False
            return
        self.input_tokens += sizes[0] or 0
        self.output_tokens += sizes[1] or 0


def is_countable(model: Any) -> bool:
    """Return whether `model` is a chat model of AgentScope."""
    return any(
        kind.__name__ == "ChatModelBase" and kind.__module__.split(".")[0] == "agentscope"
        for kind in type(model).__mro__
    )


def counted(model: Any, usage: Usage) -> Any:
    """Return a shallow copy of a chat model of AgentScope that adds to `usage` and shares the client."""
    kind: Any = type(model)
    twin = copy.copy(model)
    twin.__class__ = _counting(kind)
    twin.sharpen_usage = usage
    return twin


@functools.cache
def _counting(base: Any) -> Any:
    """Return a subclass of a model class, with the same name, that counts its answers.

    It overrides the method that all calls go through: `_call_api` in AgentScope 2, `__call__` in AgentScope 1.
    """
    method = "_call_api" if hasattr(base, "_call_api") else "__call__"
    inner = getattr(base, method)

    async def call(self: Any, *arguments: Any, **named: Any) -> Any:
        answer = await inner(self, *arguments, **named)
        if isinstance(answer, AsyncIterable):  # not `hasattr`: AgentScope's responses raise KeyError
            return _stream(answer, self.sharpen_usage)
        self.sharpen_usage.add(answer)
        return answer

    return type(base.__name__, (base,), {method: call, "__module__": base.__module__, "__doc__": base.__doc__})


async def _stream(chunks: Any, usage: Usage) -> AsyncIterator[Any]:
    """Yield the chunks, then count the answer, also if the agent stops reading early. A chunk's usage covers the whole
    answer so far."""
    last = None
    try:
        async for chunk in chunks:
            if last is None or getattr(chunk, "usage", None) is not None:
                last = chunk
            yield chunk
    finally:
        if last is not None:
            usage.add(last)


# Adapts workflows with other arguments than `task, model` to the rollout runner.
#
# In: the user's functions, and a `Trial` in place of the model. Out: the functions' results. The trial keeps what the
# runner does not: the response, the execution time, the tokens and the judge's metrics.

Function = Callable[..., Any]


@dataclass(slots=True, kw_only=True)
class Trial:
    """One attempt of a candidate on a task. `arguments` are the workflow's arguments besides `task`; `usage` returns
    the tokens of its model calls after it has ended, or None if they are unknown.

    `response` is the workflow's answer, `metrics` are its metrics with time and tokens added, `judged` are the judge's
    metrics, including text.
    """

    arguments: Mapping[str, Any]
    usage: Callable[[], Usage | None]
    response: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    judged: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, output: Any, seconds: float) -> None:
        """Store the workflow's output, its duration, and the tokens it used if they are known."""
        self.response = getattr(output, "response", None)
        given = getattr(output, "metrics", None)
        self.metrics = dict(given) if isinstance(given, Mapping) else {}
        self.metrics["execution_time"] = seconds
        used = self.usage()
        if used is not None and used.complete:
            total = used.input_tokens + used.output_tokens
            tokens = {
                "input_tokens": float(used.input_tokens),
                "output_tokens": float(used.output_tokens),
                "total_tokens": float(total),
            }
            self.metrics |= {**tokens, "usage": tokens}


class TrialWorkflow:
    """The user's workflow as `workflow(task, model)`, where `model` is a `Trial`.

    `required` are the arguments that the user's function must take, `role` is its name in messages. Raises
    `ConfigError` for a wrong signature.
    """

    def __init__(self, function: Function, required: tuple[str, ...], role: str) -> None:
        self.__signature__ = _signature("task", "model", *optional_arguments(role, function, required))
        self.__qualname__ = name_of(function)
        self._function = function

    async def __call__(self, task: Any, model: Trial, **optional: Any) -> Any:
        began = time.perf_counter()
        output = await self._function(task=task, **model.arguments, **optional)
        model.measure(output, time.perf_counter() - began)
        if as_number(output) is None and not (hasattr(output, "response") or hasattr(output, "reward")):
            return output  # of the wrong kind: the runner says so
        return WorkflowOutput(
            reward=getattr(output, "reward", None), response=model, metrics=getattr(output, "metrics", None)
        )


class TrialJudge:
    """The user's judge as `judge(task, response)`, where `response` is a `Trial`.

    With `with_metrics` the user's function receives `{"response": ..., "metrics": ...}`. Its first argument may be
    called `_task`. Raises `ConfigError` for a wrong signature.
    """

    def __init__(self, function: Function, *, with_metrics: bool) -> None:
        code = getattr(function, "__code__", None)
        self._task = "_task" if code is not None and "_task" in code.co_varnames[: code.co_argcount] else "task"
        takes = optional_arguments("judge_func", function, (self._task, "response"))
        self.__signature__ = _signature("task", "response", *takes)
        self.__qualname__ = name_of(function)
        self._function = function
        self._with_metrics = with_metrics

    async def __call__(self, task: Any, response: Trial, **optional: Any) -> Any:
        trial = response
        shown = {"response": trial.response, "metrics": trial.metrics} if self._with_metrics else trial.response
        judgement = await self._function(**{self._task: task}, response=shown, **optional)
        metrics = getattr(judgement, "metrics", None)
        trial.judged = metrics if isinstance(metrics, Mapping) else {}
        return judgement


def _signature(*names: str) -> inspect.Signature:
    """Return a signature with these keyword arguments. The rollout runner passes what it names, and nothing else."""
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])


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
