"""What an environment is, whoever writes it: ours and yours (docs/use/extending.md).

In: its settings. Out: rows of tasks, a workflow, and a judge if the workflow gives no rewards itself. `import_package`
imports what an environment needs, which Sharpen does not, or raises a `ConfigError` that says how to install it.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from sharpen.config.public import EnvironmentConfig, WorkflowOutput
from sharpen.errors import ConfigError

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


REQUIREMENTS = {
    "reasoning-gym": "reasoning-gym>=0.1.25",
    "gymnasium": "gymnasium>=1.4",
    "textarena": "textarena>=0.7.4",
    "verifiers": "verifiers>=0.4",
    "openenv": "openenv>=0.10",
}
"""What each type needs, as pip takes it."""


def import_package(type_: str, module: str) -> Any:
    """Return a module that environments of a type need. Raises `ConfigError` if it is missing or does not load."""
    install = f"pip install '{REQUIREMENTS[type_]}'"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise ConfigError(f"environment.type is {type_!r}, whose package is not installed: {install}") from error
        raise ConfigError(
            f"environment.type is {type_!r}, whose package needs {error.name!r}, which is missing: {install}"
        ) from error
    except Exception as error:  # the package's code runs
        raise ConfigError(
            f"environment.type is {type_!r}, but {module} fails when it is imported: {error!r}"
        ) from error
