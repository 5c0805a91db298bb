"""Opens the environment of a run, once in each process, and gives what a run takes of it.

In: the section `environment`. Out: tasks; a workflow and a judge that travel to other processes, since they hold the
settings alone and open the environment where they are called.

A `Mixture` is several environments in one run: `args: {parts: [{name, weight, type, id, args, ...}, ...]}`, each part
an environment with settings of its own. Their tasks are mixed by the weights in an order that the settings alone
decide; its workflow and judge pass a task on to the environment that it came from. The reward of each is a metric by
its name. A dataset `{path: environment, split: test, name: ...}` in `evaluation.further` is the held-out tasks of one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from sharpen.agent.environments.environment import TEST, TRAIN, Environment, Judge
from sharpen.agent.rollout.signature import judge_arguments, workflow_arguments
from sharpen.config.doors import find_part, source_identity
from sharpen.config.public import (
    ENVIRONMENT,
    ENVIRONMENTS,
    DatasetConfig,
    EnvironmentConfig,
    JudgeOutput,
    WorkflowOutput,
)
from sharpen.config.rows import TaskTable, load_tasks
from sharpen.errors import ConfigError, DatasetError, SharpenError
from sharpen.types import Task

MIXTURE = "mixture"
PART, ROW = "environment", "row"
"""The fields of a task: the name of its part, and the part's own row."""


class Mixture:
    """Environments by name. `open_part` opens one of them."""

    def __init__(self, config: EnvironmentConfig, open_part: Any) -> None:
        if config.id is not None or config.system_prompt is not None:
            raise ConfigError("environment.id and environment.system_prompt belong to the parts of a mixture")
        self._config, parts = config, _parts(config)
        self._weights = {name: weight for name, (weight, _) in parts.items()}
        self._parts: dict[str, Environment] = {}
        try:
            for name, (_, part) in parts.items():
                self._parts[name] = open_part(part)
        except BaseException:  # a part may hold a server
            self.close()
            raise
        judges = {part.judge is not None for part in self._parts.values()}
        self.judge: Judge | None = self._judge if judges == {True} else None

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the tasks of all parts: to train, as many of each as its weight says, until one has no more; held-out
        ones all."""
        rows = {name: list(part.tasks(split)) for name, part in self._parts.items()}
        if split == TEST:
            mixed = [(name, row) for name, those in rows.items() for row in those]
            return [_task(name, row) for name, row in mixed[: self._config.held_out_tasks]]
        given = dict.fromkeys(rows, 0)
        found: list[dict[str, Any]] = []
        while self._config.train_tasks is None or len(found) < self._config.train_tasks:
            # The part that is furthest behind its weight: after any number of tasks each is within one of its share.
            name = min(given, key=lambda part: (given[part] + 1) / self._weights[part])
            if given[name] == len(rows[name]):
                break
            found.append(_task(name, rows[name][given[name]]))
            given[name] += 1
        return found

    def tasks_of(self, split: str, name: str) -> Sequence[Mapping[str, Any]]:
        """Return the tasks of one part. Raises `DatasetError` if there is none of this name."""
        if name not in self._parts:
            raise DatasetError(f"the mixture has no part {name!r}: it has {', '.join(self._parts)}")
        return [_task(name, row) for row in self._parts[name].tasks(split)]

    async def workflow(
        self, task: dict[str, Any], model: Any, auxiliary_models: Mapping[str, Any] | None = None
    ) -> WorkflowOutput:
        """Attempt a task in its environment. Where not all parts have a judge, those that have are scored here."""
        part = self._parts[task[PART]]
        takes = "auxiliary_models" in workflow_arguments(part.workflow)
        more: dict[str, Any] = {"auxiliary_models": auxiliary_models} if takes else {}
        output = await part.workflow(task=dict(task[ROW]), model=model, **more)
        if self.judge is not None:
            return output
        reward, metrics = output.reward, dict(output.metrics or {})
        if part.judge is not None:
            judged = await part.judge(task=task[ROW], response=output.response)
            reward, metrics = judged.reward, {**metrics, **(judged.metrics or {})}
        return output.model_copy(update={"reward": reward, "metrics": {**metrics, task[PART]: reward}})

    async def _judge(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        judge = self._parts[task[PART]].judge
        assert judge is not None
        judged: JudgeOutput = await judge(task=task[ROW], response=response)
        return judged.model_copy(update={"metrics": {**(judged.metrics or {}), task[PART]: judged.reward}})

    def close(self) -> None:
        """Close all parts."""
        for part in self._parts.values():
            part.close()


def parts_of(config: EnvironmentConfig) -> list[EnvironmentConfig]:
    """Return the settings of each part. Raises `ConfigError`."""
    return [part for _, part in _parts(config).values()]


def _task(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task with its part's name; `question` is repeated, for lists and pages."""
    return {**({"question": row["question"]} if "question" in row else {}), PART: name, ROW: dict(row)}


def _parts(config: EnvironmentConfig) -> dict[str, tuple[float, EnvironmentConfig]]:
    """Return weight and settings of each part. Raises `ConfigError`."""
    where = "environment.args.parts"
    given = config.args.get("parts")
    if config.args.keys() != {"parts"} or not isinstance(given, list) or len(given) < 2:
        raise ConfigError(
            f"a mixture has environment.args: {{parts: [...]}}, two environments or more, each as "
            f"{{name: sums, weight: 2, type: reasoning-gym, id: chain_sum}}; got {dict(config.args)}"
        )
    found: dict[str, tuple[float, EnvironmentConfig]] = {}
    for number, part in enumerate(given):
        if not isinstance(part, Mapping):
            raise ConfigError(f"{where}[{number}] must have a type, got {part!r}")
        settings = dict(part)
        name, weight = settings.pop("name", settings.get("id")), settings.pop("weight", 1.0)
        if not isinstance(name, str) or not name or name in found:
            problem = "has no name" if not isinstance(name, str) or not name else f"has the name of another, {name!r}"
            raise ConfigError(f"{where}[{number}] {problem}: give each part a name of its own")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ConfigError(f"{where}: the weight of {name!r} must be a number above 0, got {weight!r}")
        try:
            found[name] = (float(weight), EnvironmentConfig(**settings))
        except ConfigError as error:
            raise ConfigError(f"{where}: {name!r}: {error}") from error
        if found[name][1].type == MIXTURE:
            raise ConfigError(f"{where}: {name!r} is a mixture itself: name its parts here")
    return found


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
