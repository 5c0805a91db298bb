"""Collects what is wrong with a run's arguments, so that its owner reads all of it at once.

In: checks that raise. Out: one error: the only one as it is, or a `SeveralProblemsError` with a line for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from sharpen.errors import ConfigError, DatasetError, ModelError

P = ParamSpec("P")
T = TypeVar("T")
Problem = ConfigError | DatasetError | ModelError


class SeveralProblemsError(ConfigError):
    """More than one thing is wrong; `found` holds the error of each."""

    def __init__(self, found: Iterable[Problem]) -> None:
        self.found = tuple(found)
        super().__init__(self.found)

    def __str__(self) -> str:
        lines = ["  - " + str(problem).replace("\n", "\n    ") for problem in self.found]
        return "\n".join([f"{len(lines)} problems", *lines])


class Problems:
    """What checks have found so far."""

    def __init__(self) -> None:
        self._found: list[Problem] = []

    def check(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The function's result, or None if it raised a problem, which is kept."""
        try:
            return function(*args, **kwargs)
        except SeveralProblemsError as error:
            self._keep(error.found)
        except (ConfigError, DatasetError, ModelError) as error:
            self._keep([error])
        return None

    def raise_found(self) -> None:
        """Raise what was found: one error as it is, several together."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise SeveralProblemsError(self._found)

    def _keep(self, found: Iterable[Problem]) -> None:
        self._found += [error for error in found if str(error) not in map(str, self._found)]


def refuse(problems: Iterable[str]) -> None:
    """Raise a `ConfigError` that says all of these, if there are any."""
    found = [ConfigError(problem) for problem in problems]
    if len(found) == 1:
        raise found[0]
    if found:
        raise SeveralProblemsError(found)
