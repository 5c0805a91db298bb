"""Adapts workflows with other arguments than `task, model` to the rollout runner.

In: the user's functions, and a `Trial` in place of the model. Out: the functions' results. The trial keeps what the
runner does not: the response, the execution time, the tokens and the judge's metrics.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.agent.rollout.rewards import as_number
from sharpen.agent.rollout.signature import name_of, optional_arguments
from sharpen.beyond.trials.usage import Usage
from sharpen.config.public import WorkflowOutput

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
