"""The user's workflow and judge as the rollout runner takes them, whatever arguments the workflow is called with.

In: functions, and a `Trial` in the place of the model. Out: the same functions' results; the trial keeps what the
runner does not: the response, and what was measured beside the reward.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.config.public import WorkflowOutput
from sharpen.rollout.attempt import as_number
from sharpen.rollout.signature import name_of, optional_arguments
from sharpen.trials.usage import Usage

Function = Callable[..., Any]


@dataclass(slots=True, kw_only=True)
class Trial:
    """One attempt of a candidate on a task. `arguments` are what the workflow is called with beside `task`; `usage`
    tells, once the workflow has ended, what its model calls used (None: nobody knows).

    `response` is what the workflow answered, `metrics` what it and this module measured, `judged` the judge's metrics
    as they came, text included.
    """

    arguments: Mapping[str, Any]
    usage: Callable[[], Usage | None]
    response: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    judged: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, output: Any, seconds: float) -> None:
        """Note what the workflow gave, how long it took, and the tokens that it used, as far as they are known."""
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
    """The user's workflow as `workflow(task, model)`, where `model` is a `Trial`. Raises `ConfigError` for a wrong
    signature; `required` are its arguments, `role` is what the user calls it."""

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
    """The user's judge, `judge(task, response)`, where `response` comes as a `Trial`. `with_metrics` hands it
    `{"response": ..., "metrics": ...}`. It may name its first argument `_task`. Raises `ConfigError` for a wrong
    signature."""

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
    """What a function takes by name, so that it is passed these and no others."""
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
