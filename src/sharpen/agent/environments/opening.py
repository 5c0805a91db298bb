"""Opens the environment of a run, once in each process, and gives what a run takes of it.

In: the section `environment`. Out: tasks; a workflow and a judge that travel to other processes, since they hold the
settings alone and open the environment where they are called.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from sharpen.agent.environments.environment import TEST, TRAIN, Environment
from sharpen.agent.environments.mixture import TYPE as MIXTURE
from sharpen.agent.environments.mixture import Mixture, parts_of
from sharpen.agent.rollout.signature import judge_arguments, workflow_arguments
from sharpen.config.doors import find_part, source_identity
from sharpen.config.public import ENVIRONMENT, ENVIRONMENTS, DatasetConfig, EnvironmentConfig, JudgeOutput
from sharpen.config.rows import TaskTable, load_tasks
from sharpen.errors import ConfigError, DatasetError, SharpenError
from sharpen.types import Task

_HOMES = {
    "reasoning-gym": ("reasoning_gym", "ReasoningGym", "reasoning-gym"),
    "gymnasium": ("gymnasium", "Gymnasium", "gymnasium"),
    "textarena": ("textarena", "TextArena", "textarena"),
    "verifiers": ("verifiers", "Verifiers", "verifiers"),
    "openenv": ("openenv", "OpenEnv", "openenv"),
    "harbor": ("harbor", "Harbor", None),
}
"""Module, class and package of ours (None: it needs none). They are loaded when they are opened."""
_opened: dict[str, Environment] = {}
"""The environments of this process, by their settings."""
_lock = threading.Lock()

Functions = tuple[Any, Callable[..., Any] | None]
"""Workflow and judge."""


def opened(config: EnvironmentConfig) -> Environment:
    """Return the environment with these settings, opened at the first call. Raises `ConfigError`."""
    key = config.model_dump_json()
    with _lock:
        if key not in _opened:
            _opened[key] = _open(config)
        return _opened[key]


@contextlib.contextmanager
def closing_environment(config: EnvironmentConfig | None) -> Iterator[None]:
    """Close the environment with these settings at the end, if there is one and it is open."""
    try:
        yield
    finally:
        if config is not None:
            _close(config.model_dump_json())


def _close(key: str) -> None:
    with _lock:
        environment = _opened.pop(key, None)
    if environment is not None:
        environment.close()


@atexit.register
def _close_all() -> None:
    """Close what is open in a worker's process, which nobody else tells that the run is over."""
    for key in list(_opened):
        _close(key)


def functions_of(config: EnvironmentConfig | None, workflow: Any, judge: Callable[..., Any] | None) -> Functions:
    """Return workflow and judge of a run: those that are given, else those of its environment. A workflow of the
    user's on its tasks is scored by its judge. Raises `ConfigError` as `opened` does."""
    if config is None:
        return workflow, judge
    environment = opened(config)
    if judge is None and environment.judge is not None:
        judge = functools.partial(judge_of_environment, config)
    return functools.partial(workflow_of_environment, config) if workflow is None else workflow, judge


def tasks_of(dataset: DatasetConfig, config: EnvironmentConfig | None) -> Sequence[Task]:
    """Return the tasks of a dataset, or of the environment if the dataset is that. Raises `DatasetError`."""
    if config is None or dataset.path != ENVIRONMENT:
        return load_tasks(dataset)
    split = dataset.split or TRAIN
    environment = opened(config)
    if split not in (TRAIN, TEST) or not (dataset.name is None or isinstance(environment, Mixture)):
        raise DatasetError(
            f"the environment has the tasks of split {TRAIN!r} and of {TEST!r}, and no name, got "
            f"{split!r}{'' if dataset.name is None else f' of name {dataset.name!r}'}"
        )
    try:
        if isinstance(environment, Mixture) and dataset.name is not None:
            rows = environment.tasks_of(split, dataset.name)
        else:
            rows = environment.tasks(split)
    except SharpenError:
        raise
    except Exception as error:  # somebody's own environment may raise anything
        raise DatasetError(f"environment {config.type!r} gives no tasks: {type(error).__name__}: {error}") from error
    if not len(rows):
        raise DatasetError(f"environment {config.type!r} has no tasks of split {split!r}: it needs at least one")
    return TaskTable(rows, split)


def environment_identity(config: EnvironmentConfig) -> dict[str, int | str]:
    """Return by what a run that goes on recognizes the code of its environment: the version of the package and what its
    module's `identity` adds, or the digest of somebody's own file."""
    if config.type == MIXTURE:
        return {name: value for part in parts_of(config) for name, value in environment_identity(part).items()}
    if config.type in _HOMES:
        module, _, package = _HOMES[config.type]
        more = getattr(_module(module), "identity", None)
        return {**({package: version(package)} if package else {}), **(more(config) if more else {})}
    return source_identity("environments", config.type)


def _open(config: EnvironmentConfig) -> Environment:
    if config.type == MIXTURE:
        return Mixture(config, _open)
    assert {*_HOMES, MIXTURE} == set(ENVIRONMENTS)
    if config.type in _HOMES:
        module, name, _ = _HOMES[config.type]
        make = getattr(_module(module), name)
    else:
        make = find_part("environments", config.type, {})
    try:
        environment: Environment = make(config)
    except SharpenError:
        raise
    except Exception as error:  # somebody's own environment may raise anything
        raise ConfigError(f"environment {config.type!r} cannot be opened: {type(error).__name__}: {error}") from error
    workflow_arguments(environment.workflow)
    if environment.judge is not None:
        judge_arguments(environment.judge)
    return environment


def _module(name: str) -> Any:
    return importlib.import_module(f"sharpen.agent.environments.{name}")


async def workflow_of_environment(
    config: EnvironmentConfig, task: dict[str, Any], model: Any, auxiliary_models: dict[str, Any]
) -> Any:
    """Attempt a task in the environment with these settings, which may ask for further models."""
    workflow = (await _here(config)).workflow
    takes = workflow_arguments(workflow)
    more = {"auxiliary_models": auxiliary_models} if "auxiliary_models" in takes else {}
    return await workflow(task=task, model=model, **more)


async def judge_of_environment(config: EnvironmentConfig, task: dict[str, Any], response: Any) -> JudgeOutput:
    """Score a response by the judge of the environment with these settings."""
    judge = (await _here(config)).judge
    assert judge is not None
    judged: JudgeOutput = await judge(task=task, response=response)
    return judged


async def _here(config: EnvironmentConfig) -> Environment:
    """Return the environment of this process; opening it, which imports packages, must not hold the loop."""
    return await asyncio.to_thread(opened, config)
