"""What an environment is, whoever writes it: ours and yours (docs/use/extending.md).

In: its settings. Out: rows of tasks, a workflow, and a judge if the workflow gives no rewards itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from sharpen.config.public import EnvironmentConfig, WorkflowOutput

TRAIN, TEST = "train", "test"
"""The splits of an environment: tasks to train on, and held-out ones."""

Judge = Callable[..., Awaitable[Any]]
"""`async def judge(task, response)`, as `tune()` takes it."""


class Environment(Protocol):
    """Tasks, and how one is attempted.

    A run opens one, and so does each further process in which its rollouts run. What belongs to one rollout is opened
    and closed in `workflow`. All is called on the user's loop, which others share: what blocks goes to a thread.
    """

    @property
    def judge(self) -> Judge | None:
        """What scores the response of `workflow`; None if that gives the reward."""

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of `TRAIN` or `TEST`, of values that JSON has: the same ones in the same order at every call
        and in every process. No task is in both. Raises `DatasetError` if there are none."""

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Attempt a task with `model`, as a workflow of a user's does: reward or response, metrics."""

    def close(self) -> None:
        """Give up what the environment holds. Closing again does nothing."""


OpenEnvironment = Callable[[EnvironmentConfig], Environment]
"""What `environment.type` names: a class or a function. Raises `ConfigError` for settings that the environment does not
have, in a sentence that says which there are."""
