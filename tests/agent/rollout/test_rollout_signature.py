"""Signatures are checked before anything is loaded, each mistake in one sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from sharpen.agent.rollout.signature import judge_arguments, name_of, workflow_arguments
from sharpen.errors import ConfigError


async def workflow(task: Any, model: Any) -> None: ...


async def with_auxiliary(task: Any, model: Any, auxiliary_models: Any = None, temperature: float = 1.0) -> None: ...


async def with_everything(*, task: Any, model: Any, logger: Any, auxiliary_models: Any) -> None: ...


async def judge(task: Any, response: Any, auxiliary_models: Any) -> None: ...


class Agent:
    async def __call__(self, task: Any, model: Any, logger: Any) -> None: ...

    async def run(self, task: Any, model: Any) -> None: ...


async def of_a_set(task: Any, model: Any, task_set: str | None) -> None: ...


async def configurable(prompt: str, task: Any, model: Any) -> None: ...


def test_what_is_accepted() -> None:
    assert workflow_arguments(workflow) == frozenset()
    assert workflow_arguments(with_auxiliary) == {"auxiliary_models"}
    assert workflow_arguments(with_everything) == {"auxiliary_models", "logger"}
    assert workflow_arguments(Agent()) == {"logger"}
    assert workflow_arguments(of_a_set) == {"task_set"}
    assert workflow_arguments(Agent().run) == frozenset()
    assert workflow_arguments(functools.partial(configurable, "be brief")) == frozenset()
    assert workflow_arguments(functools.partial(configurable, prompt="be brief")) == frozenset()
    assert judge_arguments(judge) == {"auxiliary_models"}
    assert name_of(functools.partial(configurable, "x")) == "configurable"
    assert name_of(Agent()) == "Agent"


def synchronous(task: Any, model: Any) -> None: ...


async def generator(task: Any, model: Any) -> Any:
    yield 1


async def no_model(task: Any, llm: Any) -> None: ...


async def nothing() -> None: ...


async def extra(task: Any, model: Any, tools: Any, memory: Any) -> None: ...


async def keywords(task: Any, model: Any, **kwargs: Any) -> None: ...


async def positions(*args: Any) -> None: ...


async def positional(task: Any, model: Any, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (synchronous, "workflow_func `synchronous` is not async: write `async def`"),
        (functools.partial(synchronous), "`synchronous` is not async"),
        (generator, "is an async generator"),
        (no_model, "workflow_func `no_model` takes task, llm, but not model"),
        (nothing, "takes nothing, but not task and model"),
        (extra, "needs tools and memory, which nobody passes"),
        (keywords, r"takes \*\*kwargs"),
        (positions, r"takes \*args"),
        (positional, "by position only"),
        (Agent, "is the class `Agent`"),
        ("agent.py:run", "is 'agent.py:run', which cannot be called"),
        (None, "is None, which cannot be called"),
        (configurable, "needs prompt, which nobody passes"),
    ],
)
def test_what_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        workflow_arguments(function)
    assert "\n" not in str(caught.value)


def test_a_judge_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="judge_func `workflow` takes task, model, but not response"):
        judge_arguments(workflow)
