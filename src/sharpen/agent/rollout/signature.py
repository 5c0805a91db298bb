"""Checks the signatures of the user's two functions before anything is loaded.

In: the workflow and the judge. Out: the optional arguments that each takes; `ConfigError` for a wrong signature, which
says in one sentence what was passed and what to do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sharpen.errors import ConfigError

OPTIONAL = ("auxiliary_models", "logger", "task_set", "workflow_args")
"""Arguments that a workflow or a judge may take."""


def workflow_arguments(workflow: Callable[..., Any]) -> frozenset[str]:
    """Return the optional arguments that a workflow takes besides `task` and `model`. Raises `ConfigError`."""
    return optional_arguments("workflow_func", workflow, ("task", "model"))


def judge_arguments(judge: Callable[..., Any]) -> frozenset[str]:
    """Return the optional arguments that a judge takes besides `task` and `response`. Raises `ConfigError`."""
    return optional_arguments("judge_func", judge, ("task", "response"))


def needed_arguments(judge: Callable[..., Any]) -> frozenset[str]:
    """Return the optional arguments that a judge cannot do without. Raises `ConfigError`."""
    names = judge_arguments(judge)
    parameters = inspect.signature(judge).parameters
    return frozenset(name for name in names if parameters[name].default is inspect.Parameter.empty)


def check_workflow_function(function: Callable[..., Any]) -> None:
    """Raise `ConfigError` (a `ValueError`) unless `tune()` would accept the function as its workflow."""
    workflow_arguments(function)


def check_judge_function(function: Callable[..., Any]) -> None:
    """Raise `ConfigError` (a `ValueError`) unless `tune()` would accept the function as its judge."""
    judge_arguments(function)


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages: its own, that of the function a partial wraps, or its class's."""
    inner = _unwrap(function)
    name = str(getattr(inner, "__qualname__", type(inner).__qualname__))
    return name.rsplit("<locals>.", 1)[-1]


def _unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def optional_arguments(role: str, function: Callable[..., Any], required: tuple[str, ...]) -> frozenset[str]:
    """Return the optional arguments that an async function takes besides the `required` ones.

    Raises `ConfigError` for any other signature; the message calls the function by its `role`.
    """
    wanted = f"async def {role}({', '.join(required)})"
    if not callable(function):
        raise ConfigError(f"{role} is {function!r}, which cannot be called: pass a function like `{wanted}`")
    name = name_of(function)
    if inspect.isclass(_unwrap(function)):
        raise ConfigError(f"{role} is the class `{name}`: pass a function like `{wanted}`, or an object of the class")
    _check_async(role, name, function)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise ConfigError(f"{role} `{name}` has no readable signature: wrap it as `{wanted}`") from error
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind == parameter.VAR_POSITIONAL else "**"
            raise ConfigError(
                f"{role} `{name}` takes {stars}{parameter.name}, which hides what it needs: write `{wanted}`"
            )
        if parameter.kind == parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{role} `{name}` takes `{parameter.name}` by position only, but arguments are passed by name: remove "
                "the `/`"
            )
    missing = [argument for argument in required if argument not in parameters]
    if missing:
        has = ", ".join(parameters) or "nothing"
        raise ConfigError(f"{role} `{name}` takes {has}, but not {' and '.join(missing)}: write `{wanted}`")
    known = (*required, *OPTIONAL)
    extra = [p.name for p in parameters.values() if p.name not in known and p.default is p.empty]
    if extra:
        raise ConfigError(
            f"{role} `{name}` needs {' and '.join(extra)}, which nobody passes: give a default value or remove it "
            f"(what can be passed: {', '.join(known)})"
        )
    return frozenset(OPTIONAL) & frozenset(parameters)


def _check_async(role: str, name: str, function: Callable[..., Any]) -> None:
    inner = _unwrap(function)
    candidates = (inner, type(inner).__call__)
    if any(inspect.iscoroutinefunction(candidate) for candidate in candidates):
        return
    if any(inspect.isasyncgenfunction(candidate) for candidate in candidates):
        raise ConfigError(f"{role} `{name}` is an async generator (it has a `yield`): return one result instead")
    raise ConfigError(
        f"{role} `{name}` is not async: write `async def`, and `await asyncio.to_thread(...)` around blocking code"
    )
