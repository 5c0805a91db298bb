"""Environments of the package verifiers: tasksets, agents with tools, several weighted rewards.

In: `id`, a taskset by the name of its package, or the path of a folder or file with it; `args`, the environment's own
configuration as its command line has it (`{"taskset": {...}, "agent": {"max_turns": 4}}`), and `held_out`, what the
taskset has in place of it for held-out tasks. Out: rows with the task's data; a workflow that runs one episode, whose
model calls verifiers passes on to the gateway. The reward is the sum of the weighted rewards, and each is a metric.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from sharpen.agent.environments.environment import TEST, TRAIN, import_package
from sharpen.agent.environments.games import NUM_HELD_OUT, NUM_TRAIN
from sharpen.agent.tasks.order import hold_out
from sharpen.config.public import EnvironmentConfig, WorkflowOutput
from sharpen.errors import ConfigError, DatasetError, RolloutError

TYPE = "verifiers"
HELD_OUT = "held_out"
"""The name in `args` of what the taskset has for held-out tasks."""
_PLAIN = ("bash", "null")
"""Harnesses that a taskset has if it names none; a chat with the task's tools takes their place."""
_SHARE, _AT_MOST = 0.1, 512
"""Tasks that are held out where the settings do not say how many."""


class Verifiers:
    """A taskset with the agents that work on its tasks, opened anew for each rollout."""

    judge = None

    def __init__(self, config: EnvironmentConfig) -> None:
        self._vf = import_package(TYPE, "verifiers.v1")
        if config.id is None:
            raise ConfigError("environment.id is missing: the name of a taskset of verifiers, or the path of one")
        self._given, self._name = config, _importable(config.id)
        arguments = dict(config.args)
        held_out = arguments.pop(HELD_OUT, None)
        self._config = self._resolve(arguments)
        self._other = None
        if held_out is not None:
            self._other = self._resolve({**arguments, "taskset": {**(arguments.get("taskset") or {}), **held_out}})

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of a split."""
        return [
            {"split": split, "index": index, "task": task.data.model_dump(mode="json", exclude_none=True)}
            for index, task in self._splits[split].items()
        ]

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Run one episode of a task. Several agents are recorded by their names, each with its reward."""
        environment = self._vf.load_environment(self._with_clients(model))
        context = self._vf.ModelContext(model=model.name, client=self._client(model))
        async with environment.serving():
            episode = await environment.run_episode(self._splits[task["split"]][task["index"]], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            said = f"{errors[-1].type}: {errors[-1].message}" if errors else "no error was recorded"
            raise RolloutError(f"an episode of {self._given.id!r} failed: {said}")
        return _output(episode.traces, several=len(self._roles) > 1)

    def close(self) -> None:
        """Do nothing: each rollout closes its own."""

    @cached_property
    def _splits(self) -> Mapping[str, Mapping[int, Any]]:
        """The tasks of each split by their place in the taskset."""
        given = self._given
        wanted = (given.train_tasks or NUM_TRAIN) + (given.held_out_tasks or NUM_HELD_OUT)
        tasks = self._load(self._config, wanted)
        if self._other is None:
            share, at_most = (_SHARE, _AT_MOST) if given.held_out_tasks is None else (1.0, given.held_out_tasks)
            training, held_out = hold_out(tasks, given.seed, share, at_most)
        else:
            held_out = self._load(self._other, wanted)[: given.held_out_tasks]
            asked = {_content(task) for _, task in held_out}
            training = [(index, task) for index, task in tasks if _content(task) not in asked]
        return {TRAIN: dict(training[: given.train_tasks]), TEST: dict(held_out)}

    def _load(self, config: Any, wanted: int) -> list[tuple[int, Any]]:
        """Return the tasks of a taskset with their places, `wanted` at most of one that never ends."""
        try:
            taskset = self._vf.load_taskset(config.taskset)
            return list(enumerate(taskset if taskset.bounded else itertools.islice(iter(taskset), wanted)))
        except Exception as error:  # the taskset's code runs
            raise DatasetError(
                f"taskset {self._given.id!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    @property
    def _roles(self) -> dict[str, Any]:
        """The agents' configurations, by role."""
        return _roles(self._vf, self._config)

    def _resolve(self, arguments: Mapping[str, Any]) -> Any:
        """Return the configuration, in which agents run on this machine. Raises `ConfigError`."""
        chat = import_package(TYPE, "sharpen.agent.environments.verifiers_chat")

        try:
            config = self._vf.resolve_env_config(
                {**arguments, "taskset": {**(arguments.get("taskset") or {}), "id": self._name}}
            )
            default = self._vf.default_harness_id(self._name)
        except Exception as error:  # of pydantic, or of the taskset's own code
            raise ConfigError(
                f"environment {self._given.id!r} of verifiers does not take environment.args "
                f"{dict(self._given.args)}: {' '.join(str(error).split())}"
            ) from error
        changes = {}
        for name, role in _roles(self._vf, config).items():
            own: dict[str, Any] = {}
            if "runtime" not in (arguments.get(name) or {}):
                own["runtime"] = self._vf.SubprocessConfig()
            if (default if role.harness is None else role.harness.id) in _PLAIN:
                own["harness"] = chat.ChatConfig(id=chat.ID)
            changes[name] = role.model_copy(update=own)
        return config.model_copy(update=changes)

    def _with_clients(self, model: Any) -> Any:
        """Return the configuration in which each of several agents has the key of its own name."""
        roles = self._roles
        if len(roles) == 1:
            return self._config
        return self._config.model_copy(
            update={
                name: role.model_copy(update={"client": self._client(model.named(name)), "model": model.name})
                for name, role in roles.items()
                if role.client is None
            }
        )

    def _client(self, model: Any) -> Any:
        """Return the address of a model, whose path has its key: verifiers takes keys from the environment alone."""
        return self._vf.EvalClientConfig(
            base_url=getattr(model, "keyed_url", model.base_url), api_key_var="SHARPEN_KEY_IN_PATH"
        )


def _roles(vf: Any, config: Any) -> dict[str, Any]:
    return {name: value for name, value in config if isinstance(value, vf.AgentConfig)}


def _importable(name: str) -> str:
    """Return the module's name of a taskset that is named by a path, and make it importable; any other as it is."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    path = path.resolve()
    inner = path / path.name
    home = path if (inner / "__init__.py").is_file() else path.parent
    if str(home) not in sys.path:
        sys.path.insert(0, str(home))
        # tool servers are processes of their own
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))
    return path.stem


def _content(task: Any) -> str:
    """Return what a task is, wherever it stands."""
    return str(task.data.model_dump_json(exclude={"idx"}))


def _output(traces: Sequence[Any], *, several: bool) -> WorkflowOutput:
    """Return reward and metrics of an episode: of each agent by its name, where there are several."""
    metrics: dict[str, Any] = {"turns": sum(trace.num_turns for trace in traces)}
    rewards: dict[str, list[float]] = {}
    for trace in traces:
        if trace.agent.trainable:
            rewards.setdefault(trace.agent.name, []).append(trace.reward)
        named = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        numbers = {**{name: value for name, value in trace.metrics.items() if value is not None}, **named}
        metrics |= {f"{trace.agent.name}/{name}" if several else name: value for name, value in numbers.items()}
    if not rewards:
        raise RolloutError("no agent of the episode trains")
    mean = {name: fmean(values) for name, values in rewards.items()}
    if not several:
        return WorkflowOutput(reward=fmean(mean.values()), metrics=metrics)
    return WorkflowOutput(reward=fmean(mean.values()), call_rewards=mean, train=[*mean], metrics=metrics)
