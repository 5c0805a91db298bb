"""`Task` as a Trinity `Workflow` receives it: the row, and how to read it.

In: a row of the dataset, the run's `task_args` and `workflow_args`. Out: a `Task` that belongs to one rollout alone, so
that a workflow may change it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from pydantic import Field

from sharpen.config.explain import InvalidConfigError
from sharpen.config.public import Strict
from sharpen.errors import ConfigError


class TasksetConfig(Strict):
    """What a `Workflow` class gets with each task, beside the row itself: the run's `task_args`."""

    prompt_key: str = "prompt"
    """Field of the row that holds the question."""
    response_key: str = "response"
    """Field of the row that holds the true answer."""
    system_prompt: str | None = None
    """System prompt of the simple workflows."""
    reply_prefix: str | None = None
    """What the simple workflows begin the answer with."""
    image_key: str | None = None
    """Field of the row that holds the images of the question."""
    video_key: str | None = None
    """Field of the row that holds videos, which no model reads here."""
    reward_fn: str | None = None
    """Registered name of the reward function, or `package.module:Class`."""
    reward_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the reward function when it is made."""
    rollout_args: dict[str, Any] = Field(default_factory=dict)
    """Sampling settings that the workflow passes with its calls."""

    @classmethod
    def of(cls, task_args: Mapping[str, Any]) -> TasksetConfig:
        """Raises `ConfigError` for what is no setting of a taskset, and values that are not allowed."""
        try:
            return cls(**{str(name): value for name, value in task_args.items()})
        except InvalidConfigError as error:
            raise InvalidConfigError.of("task_args", error.problems) from None


@dataclass(slots=True, kw_only=True)
class FormatConfig:
    """Which fields of the row hold what, and what the simple workflows add."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt: str | None = None
    reply_prefix: str | None = None
    image_key: str | None = None
    video_key: str | None = None


@dataclass(slots=True, kw_only=True)
class GenerationConfig:
    """Sampling settings that the workflow passes with its calls; None leaves the model's own."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = -1
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1


@dataclass(slots=True, kw_only=True)
class Task:
    """One task of one rollout. `raw_task` is the row; `reward_fn` the class of the reward function, if one was named.

    `repeat_times` is 1, or the group's size where one run of the workflow makes the whole group. `is_eval`
    says whether the rollout is an evaluation's. `task_id` names the group of rollouts (and the task) that it is of,
    `index["rollout"]` is its number there.
    """

    raw_task: dict[str, Any]
    workflow: type | None = None
    format_args: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn: Callable[..., Any] | None = None
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    repeat_times: int = 1
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)

    @property
    def task_desc(self) -> Any:
        """The question: the row's `prompt_key`; None without such a field."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """The true answer: the row's `response_key`; None without such a field."""
        return self.raw_task.get(self.format_args.response_key)

    def to_dict(self) -> dict[str, Any]:
        """The row."""
        return self.raw_task


def generation_config(rollout_args: Mapping[str, Any]) -> GenerationConfig:
    """The sampling settings of a taskset. Raises `ConfigError` for an unknown one, and for `n` other than 1."""
    known = [item.name for item in fields(GenerationConfig)]
    for name in rollout_args:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
            raise ConfigError(f"task_args.rollout_args has no {name!r}{hint}")
    if rollout_args.get("n", 1) != 1:
        raise ConfigError(
            f"task_args.rollout_args.n is {rollout_args['n']!r}: a rollout is one run of the workflow; "
            "algorithm.group_size says how many there are of a task"
        )
    return GenerationConfig(**rollout_args)


def task_of(
    row: dict[str, Any],
    taskset: TasksetConfig,
    workflow_args: Mapping[str, Any],
    *,
    workflow: type,
    reward_fn: Callable[..., Any] | None,
    is_eval: bool,
    rollout: str,
    repeat_times: int = 1,
) -> Task:
    """A task of its own for the rollout of this id (`<group id>/<index>`); nothing in it is shared with others."""
    group, _, index = rollout.rpartition("/")
    return Task(
        raw_task=row,
        workflow=workflow,
        format_args=FormatConfig(
            prompt_key=taskset.prompt_key,
            response_key=taskset.response_key,
            system_prompt=taskset.system_prompt,
            reply_prefix=taskset.reply_prefix,
            image_key=taskset.image_key,
            video_key=taskset.video_key,
        ),
        rollout_args=generation_config(taskset.rollout_args),
        workflow_args=copy.deepcopy(dict(workflow_args)),
        reward_fn=reward_fn,
        reward_fn_args=copy.deepcopy(dict(taskset.reward_fn_args)),
        is_eval=is_eval,
        repeat_times=repeat_times,
        task_id=group,
        index={"rollout": int(index or 0)},
    )
