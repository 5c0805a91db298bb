"""Collects the problems of a run's arguments, so that the user reads all of them at once.

In: checks that raise. Out: the error itself if there is only one, else a `SeveralProblemsError` with a line for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

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
