"""Collects the problems of a run's arguments, so that the user reads all of them at once.

In: checks that raise. Out: the error itself if there is only one, else a `SeveralProblemsError` with a line for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError, DatasetError, ModelError

P = ParamSpec("P")
T = TypeVar("T")
InputError = ConfigError | DatasetError | ModelError


class SeveralProblemsError(ConfigError):
    """Several errors at once; `found` holds each of them."""

    def __init__(self, found: Iterable[InputError]) -> None:
        self.found = tuple(found)
        super().__init__(self.found)

    def __str__(self) -> str:
        lines = ["  - " + str(problem).replace("\n", "\n    ") for problem in self.found]
        return "\n".join([f"{len(lines)} problems", *lines])


class Problems:
    """Runs checks and keeps the errors that they raise."""

    def __init__(self) -> None:
        self._found: list[InputError] = []

    def check(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function and return its result, or keep the error that it raised and return None."""
        try:
            return function(*args, **kwargs)
        except SeveralProblemsError as error:
            self._keep(error.found)
        except (ConfigError, DatasetError, ModelError) as error:
            self._keep([error])
        return None

    def raise_found(self) -> None:
        """Raise the kept error, or several as one `SeveralProblemsError`."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise SeveralProblemsError(self._found)

    def _keep(self, found: Iterable[InputError]) -> None:
        self._found += [error for error in found if str(error) not in map(str, self._found)]


def refuse(problems: Iterable[str]) -> None:
    """Raise a `ConfigError` with all of these messages, if there are any."""
    found = [ConfigError(problem) for problem in problems]
    if len(found) == 1:
        raise found[0]
    if found:
        raise SeveralProblemsError(found)


# Settings that are allowed and hardly meant: said once, before anything is loaded.
#
# In: the configuration, and the size of the run. Out: a line for each.

HIGH_RATE = 1e-2
"""AdamW moves a weight by about the learning rate in an update, and the weights of a language model are about 0.02."""


def doubtful(config: RunConfig, *, num_tasks: int, total_steps: int) -> Iterator[str]:
    """Yield what a run with so many training tasks (0: unknown) and steps would hardly be meant to do."""
    model, algorithm, trainer = config.model, config.algorithm, config.trainer
    if "max_tokens" in model.model_fields_set and model.max_tokens > model.max_model_len:
        yield (
            f"model.max_tokens is {model.max_tokens}, above model.max_model_len ({model.max_model_len}), which prompt "
            "and answer share: no answer becomes that long. Raise max_model_len, or lower max_tokens"
        )
    if 0 < num_tasks < algorithm.batch_size:
        yield (
            f"algorithm.batch_size is {algorithm.batch_size}, but there are {num_tasks} tasks: each step has some of "
            "them more than once. Lower it, or raise algorithm.group_size for more rollouts of a task"
        )
    if algorithm.learning_rate > HIGH_RATE:
        yield (
            f"algorithm.learning_rate is {algorithm.learning_rate:g}: an update moves each weight by about that, and "
            f"weights are about 0.02. Above {HIGH_RATE:g} a model is usually lost (1e-6 is the default; LoRA takes "
            "1e-5 to 1e-4)"
        )
    updates = total_steps * trainer.updates
    if trainer.warmup_steps >= updates > 0:
        yield (
            f"trainer.warmup_steps is {trainer.warmup_steps}, but the run has {updates} updates: the learning rate "
            "never reaches algorithm.learning_rate"
        )
