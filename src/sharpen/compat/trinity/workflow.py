"""`Workflow` as Trinity's users subclass it, and the base for conversations of several turns.

In: a `Task`, a `ModelWrapper`, auxiliary models. Out: `Experience`s with rewards. The adapter makes a new workflow for
each rollout and runs it once; nothing of it is shared or used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from sharpen.compat.trinity.experience import Experience, is_number
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.task import Task

log = logging.getLogger("sharpen.workflow")

Run = TypeVar("Run", bound=Callable[..., Any])


class Workflow:
    """Runs an agent on one task and returns scored experiences.

    Subclasses write `run`, or `run_async` (and `is_async = True` where they have both). `self.task`, `self.model`,
    `self.auxiliary_models`, `self.auxiliary_model_wrappers` and `self.logger` are there in the constructor already,
    also in one that does not call `super().__init__()`.

    The annotation of the constructor's `auxiliary_models` decides what it receives: `List[openai.OpenAI]`,
    `List[openai.AsyncOpenAI]`, or `ModelWrapper`s. `self.auxiliary_models` holds OpenAI clients in any case (async ones
    for an asynchronous workflow, where the annotation does not say), `self.auxiliary_model_wrappers` the wrappers.
    """

    can_reset: bool = False
    """Accepted: workflows are not used for a second task here."""
    can_repeat: bool = False
    """Whether `run` repeats itself; it is asked to run once (`set_repeat_times(1, 0)`)."""
    is_async: bool = False
    """Which of `run` and `run_async` is meant, where a class has both."""

    task: Task
    model: ModelWrapper
    auxiliary_models: list[Any] | None
    auxiliary_model_wrappers: list[ModelWrapper] | None
    logger: logging.Logger
    run_id_base: int

    def __new__(cls, *_: Any, **arguments: Any) -> Self:
        self = super().__new__(cls)
        if "task" in arguments and "model" in arguments:
            self._attach(arguments["task"], arguments["model"], arguments.get("auxiliary_models"))
        return self

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        self._attach(task, model, auxiliary_models)

    def _attach(self, task: Task, model: ModelWrapper, auxiliary_models: Sequence[Any] | None) -> None:
        self.task = task
        self.model = model
        self.logger = log
        self.run_id_base = 0
        self.auxiliary_models = None
        self.auxiliary_model_wrappers = None
        if not auxiliary_models:
            return
        given = list(auxiliary_models)
        wrappers = [item if isinstance(item, ModelWrapper) else item.model_wrapper for item in given]
        self.auxiliary_model_wrappers = wrappers
        if not isinstance(given[0], ModelWrapper):
            self.auxiliary_models = given
        elif self.asynchronous:
            self.auxiliary_models = [wrapper.get_openai_async_client() for wrapper in wrappers]
        else:
            self.auxiliary_models = [wrapper.get_openai_client() for wrapper in wrappers]

    @property
    def resettable(self) -> bool:
        """Older name of `can_reset`."""
        return type(self).can_reset

    @property
    def repeatable(self) -> bool:
        """Older name of `can_repeat`."""
        return type(self).can_repeat

    @property
    def asynchronous(self) -> bool:
        """Older name of `is_async`; classes may override either."""
        return type(self).is_async or (overrides(type(self), "run_async") and not overrides(type(self), "run"))

    def reset(self, task: Task) -> None:
        """Take another task. Not called here, but by the simple workflows' own constructor."""
        raise NotImplementedError

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """How often `run` repeats itself; called with 1 and 0 where `can_repeat` is true."""
        raise NotImplementedError

    def run(self) -> list[Experience]:
        """Run once and return the experiences. It runs in a thread of its own, and may block."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        """Run once and return the experiences, on the loop that all rollouts share: it may not block."""
        raise NotImplementedError


def each_alone(run: Run) -> Run:
    """Mark a `run` (or `run_async`) that treats the answers to a task one by one: run once for each of them it gives
    the same, and a failure is one rollout's alone."""
    run.each_alone = True  # type: ignore[attr-defined]
    return run


def overrides(workflow: type[Workflow], method: str) -> bool:
    """Whether a class, or one of its bases, has its own version of a method."""
    return getattr(workflow, method) is not getattr(Workflow, method)


class MultiTurnWorkflow(Workflow):
    """Base for workflows that hold a conversation and turn its messages into one experience."""

    repeat_times: int = 1

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Called with 1 and 0 where `can_repeat` is true."""
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base

    def process_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """The experience of the calls that made this conversation, with a reward for all of them.

        `info` is kept on it (and `truncate_status` in it); its numbers become metrics. Raises `ConfigError` where the
        model did not make the conversation.
        """
        experience = self.model.convert_messages_to_experience(messages)
        experience.reward = reward
        experience.info = dict(info or {}) | ({"truncate_status": truncate_status} if truncate_status else {})
        experience.metrics = {name: float(value) for name, value in experience.info.items() if is_number(value)}
        return experience

    async def process_messages_to_experience_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """As `process_messages_to_experience`."""
        return self.process_messages_to_experience(messages, reward, info, truncate_status)
