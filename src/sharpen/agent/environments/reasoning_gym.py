"""The generators of the package reasoning-gym: made-up questions, each with a rule that scores any answer.

In: `id`, a generator's name or `composite`; `args`, the generator's own settings. Out: rows with question, answer
(where there is a single one), generator and index; a workflow of one call, and the generator's own `score_answer` as
the judge, which makes the question again by its index. Scores may lie between 0 and 1.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from sharpen.agent.environments.environment import TEST, import_package
from sharpen.config.public import EnvironmentConfig, JudgeOutput, WorkflowOutput
from sharpen.errors import ConfigError, DatasetError

TYPE = "reasoning-gym"
COMPOSITE = "composite"
NUM_TRAIN, NUM_HELD_OUT = 1000, 200
"""The tasks that are made where the settings do not say how many."""
ANSWERED = "answered"
"""Metric: whether the response had an answer between the tags."""
_SPARE = 2
"""So many times as many questions are made as are asked for, before the generator counts as too poor."""
_OURS = {"seed": "environment.seed", "size": "environment.train_tasks and held_out_tasks"}
"""Settings of a generator that have a home here."""


class ReasoningGym:
    """A generator, or several with weights. Question `i` is a function of the settings, the seed and `i` alone."""

    def __init__(self, config: EnvironmentConfig) -> None:
        package = import_package(TYPE, "reasoning_gym")
        self._utils = import_package(TYPE, "reasoning_gym.utils")
        self._id = config.id
        self._num_train = config.train_tasks or NUM_TRAIN
        self._num_held_out = config.held_out_tasks or NUM_HELD_OUT
        size = _SPARE * (self._num_train + self._num_held_out)
        self._dataset = _make(package, config, size)
        self._size = min(size, len(self._dataset))
        self.system_prompt = _system_prompt(self._utils.SYSTEM_PROMPTS, config.system_prompt)
        self._entry = functools.lru_cache(maxsize=4096)(self._dataset.__getitem__)

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of a split. The first different questions are held out, and those after them that repeat none
        of these train: a question may come twice in training."""
        return self._splits[split == TEST]

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Ask the question once."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        messages = [*system, {"role": "user", "content": task["question"]}]
        reply = await model.client.chat.completions.create(model=model.name, messages=messages)
        return WorkflowOutput(response=reply.choices[0].message.content or "")

    async def judge(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        """Score what stands between the answer tags; without them nothing was answered."""
        answer = self._utils.extract_answer(str(response))
        reward = await asyncio.to_thread(self._score, task["index"], answer)
        metrics = {ANSWERED: float(answer is not None)}
        if self._id == COMPOSITE:
            metrics[task["generator"]] = reward
        return JudgeOutput(reward=reward, metrics=metrics)

    def close(self) -> None:
        """Do nothing: all is in memory."""

    def _score(self, index: int, answer: str | None) -> float:
        return float(self._dataset.score_answer(answer, self._entry(index)))

    @functools.cached_property
    def _splits(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The rows that train, and those that are held out."""
        held_out: dict[str, dict[str, Any]] = {}
        training: list[dict[str, Any]] = []
        for index in range(self._size):
            row = self._row(index)
            if len(held_out) < self._num_held_out:
                held_out.setdefault(row["question"], row)
            elif row["question"] not in held_out:
                training.append(row)
            if len(training) == self._num_train:
                return training, list(held_out.values())
        raise DatasetError(
            f"generator {self._id!r} made {self._size} questions, of which {self._num_held_out} were to be held out "
            f"and {self._num_train} others to train: there were {len(held_out)} and {len(training)}. Give it a wider "
            "range in environment.args, or lower environment.held_out_tasks or train_tasks"
        )

    def _row(self, index: int) -> dict[str, Any]:
        try:
            entry = self._dataset[index]
        except Exception as error:  # the generator's code runs
            raise DatasetError(f"generator {self._id!r} fails at question {index}: {error!r}") from error
        answer = entry["answer"]
        return {
            "question": entry["question"],
            **({"answer": answer} if isinstance(answer, str) else {}),
            "generator": entry["metadata"]["source_dataset"],
            "index": index,
        }


def _make(package: Any, config: EnvironmentConfig, size: int) -> Any:
    """Return the generator. Raises `ConfigError` for a name or a setting that there is not."""
    known = package.factory.DATASETS
    if config.id is None:
        raise ConfigError(f"environment.id is missing: the name of a generator of reasoning-gym, or {COMPOSITE!r}")
    _check_generator(known, config.id, config.args, "environment.id", "environment.args")
    settings = dict(config.args)
    if config.id == COMPOSITE:
        settings["datasets"] = _parts(
            known, import_package(TYPE, "reasoning_gym.composite").DatasetSpec, settings.get("datasets")
        )
    try:
        return package.create_dataset(config.id, **settings, seed=config.seed, size=size)
    except Exception as error:  # assertions of the generator on its settings
        raise ConfigError(
            f"generator {config.id!r} does not take environment.args {dict(config.args)}: {error or repr(error)}"
        ) from error


def _parts(known: Mapping[str, Any], make: Any, parts: Any) -> list[Any]:
    """Return the parts of a composite. Raises `ConfigError` for what is none."""
    where = "environment.args.datasets"
    if not isinstance(parts, list) or not parts or not all(isinstance(part, Mapping) for part in parts):
        raise ConfigError(f"{where} must be a list like [{{name: chain_sum, weight: 2, config: {{}}}}], got {parts!r}")
    made = []
    for part in parts:
        name, weight, settings = part.get("name"), part.get("weight", 1.0), part.get("config") or {}
        _check_generator(known, name, settings, f"{where}: name", f"{where}: config of {name}")
        if wrong := sorted(part.keys() - {"name", "weight", "config"}):
            raise ConfigError(f"{where}: {name!r} has {wrong[0]!r}, but a part has name, weight and config")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ConfigError(f"{where}: the weight of {name!r} must be a number above 0, got {weight!r}")
        made.append(make(name=name, weight=weight, config=dict(settings)))
    return made


def _check_generator(known: Mapping[str, Any], name: Any, settings: Mapping[str, Any], what: str, where: str) -> None:
    if name not in known:
        raise ConfigError(f"{what} is {name!r}, which is no generator of reasoning-gym{_nearest(str(name), known)}")
    fields = {field.name for field in dataclasses.fields(known[name][1])}
    for setting in settings:
        if setting in _OURS:
            raise ConfigError(f"{where} has {setting!r}, which is set by {_OURS[setting]}")
        if setting not in fields:
            names = sorted(fields - _OURS.keys())
            raise ConfigError(
                f"{where} has {setting!r}, which {name!r} does not{_nearest(setting, names)}; it has {', '.join(names)}"
            )


def _nearest(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _system_prompt(named: Mapping[str, str], given: str | None) -> str:
    """Return the system message: the package's `default`, one of its others by name, or a text."""
    return named["default"] if given is None else named.get(given, given)
