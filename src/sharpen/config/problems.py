"""Collects what is wrong with a run's arguments, so that its owner reads all of it at once.

In: checks that raise. Out: one error: the only one as it is, or a line for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from sharpen.errors import ConfigError, DatasetError, ModelError

P = ParamSpec("P")
T = TypeVar("T")


class Problems:
    """What checks have found so far."""

    def __init__(self) -> None:
        self._found: list[ConfigError | DatasetError | ModelError] = []

    def check(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The function's result, or None if it raised a problem, which is kept."""
        try:
            return function(*args, **kwargs)
        except (ConfigError, DatasetError, ModelError) as error:
            if str(error) not in map(str, self._found):
                self._found.append(error)
            return None

    def raise_found(self) -> None:
        """Raise what was found: one error as it is; several as one of their kind, or as a `ConfigError`."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            kinds = {type(error) for error in self._found}
            kind = kinds.pop() if kinds <= {DatasetError} or kinds <= {ModelError} else ConfigError
            raise kind(listed(map(str, self._found)))


def listed(problems: Iterable[str]) -> str:
    """Several problems as one message: their number, and a line for each."""
    lines = ["  - " + problem.replace("\n", "\n    ") for problem in problems]
    return "\n".join([f"{len(lines)} problems", *lines])


def refuse(problems: Iterable[str]) -> None:
    """Raise a `ConfigError` that says all of these, if there are any."""
    found = list(problems)
    if found:
        raise ConfigError(found[0] if len(found) == 1 else listed(found))
