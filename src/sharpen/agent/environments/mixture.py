"""Several environments in one run, each with its weight.

In: `args: {parts: [{name, weight, type, id, args, ...}, ...]}`, each part an environment with settings of its own. Out:
their tasks, mixed by the weights in an order that the settings alone decide; a workflow and a judge that pass a task on
to the environment that it came from. The reward of each is a metric by its name. A dataset `{path: environment, split:
test, name: ...}` in `evaluation.further` is the held-out tasks of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.agent.environments.environment import TEST, Environment, Judge
from sharpen.agent.rollout.signature import workflow_arguments
from sharpen.config.public import EnvironmentConfig, JudgeOutput, WorkflowOutput
from sharpen.errors import ConfigError, DatasetError

TYPE = "mixture"
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
        if found[name][1].type == TYPE:
            raise ConfigError(f"{where}: {name!r} is a mixture itself: name its parts here")
    return found
