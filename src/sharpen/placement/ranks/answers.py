"""Collects the ranks' answers to a call of the trainer, for local processes and for actors of Ray.

In: the answers as they arrive. Out: the results of all ranks. Raises the error that all ranks raised alike, else
`RankError` with the rank that failed first.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sharpen.errors import RankError, SharpenError

GRACE_S = 20.0
"""Seconds to wait for the other ranks when one has failed: they may be about to raise the same error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """A rank's answer: a result, a `SharpenError`, or the first line and the traceback of any other error."""

    result: Any = None
    error: SharpenError | None = None
    failure: str | None = None
    traceback: str | None = None

    @property
    def problem(self) -> SharpenError | str | None:
        """The error, if there is no result."""
        return self.failure or self.error


Reply: TypeAlias = RankAnswer | str | None
"""An answer; a few words on how the rank was lost; or None if it did not answer in time."""


def run_call(serve: Callable[..., Any], *arguments: Any) -> RankAnswer:
    """Run a call and return the rank's answer. Any error but a `SharpenError` is a failure of this rank."""
    try:
        return RankAnswer(result=serve(*arguments))
    except SharpenError as error:
        return RankAnswer(error=error)
    except Exception as error:
        line = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        return RankAnswer(failure=line, traceback=traceback.format_exc())


class RankCalls(ABC):
    """The base of both implementations of `ranks.group.Calls`. A `handle` stands for a pending call of a rank."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._broken: BaseException | None = None

    @abstractmethod
    def close(self) -> None:
        """See `Calls.close`."""

    @abstractmethod
    def _wait(self, handles: Sequence[Any], timeout_s: float | None) -> Sequence[Any]:
        """Return the handles that are answered or whose rank is lost; none if the time is up."""

    @abstractmethod
    def _receive(self, rank: int, handle: Any) -> Reply:
        """Return the reply of a handle that `_wait` returned."""

    def _check_open(self) -> None:
        """Raise the error that ended the ranks, if they have ended."""
        if self._broken is not None:
            raise self._broken

    def _answers(self, handles: Sequence[Any], what: str) -> list[Any]:
        """Return every rank's result. `what` names the call in errors. Raises as `Calls.call`."""
        try:
            replies, first = self._collect(handles)
        except KeyboardInterrupt as error:
            self._broken = error  # answers of this call may still arrive, so no other call is possible
            raise
        errors = [reply.error if isinstance(reply, RankAnswer) else None for reply in replies]
        if errors[0] is not None and all(errors):
            raise errors[0]
        if first is not None:
            self._broken = _rank_error(replies, first, what)
            self.close()
            raise self._broken
        return [reply.result for reply in replies if isinstance(reply, RankAnswer)]

    def _collect(self, handles: Sequence[Any]) -> tuple[list[Reply], int | None]:
        """Return the replies, those that arrive within the grace time after a failure, and the first rank that failed
        (None if all succeeded)."""
        replies: list[Reply] = [None] * len(handles)
        pending = {handle: rank for rank, handle in enumerate(handles)}
        first: int | None = None
        deadline: float | None = None
        while pending:
            ready = self._wait(list(pending), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for handle in ready:
                rank = pending.pop(handle)
                reply = replies[rank] = self._receive(rank, handle)
                if first is None and (isinstance(reply, str) or (reply is not None and reply.problem is not None)):
                    first, deadline = rank, time.monotonic() + self._grace_s
        return replies, first


def call_name(method: str, arguments: Sequence[Any]) -> str:
    """Return the name of a call for errors: that of the trainer's method for `run`."""
    return str(arguments[0]) if method == "run" else method


def _rank_error(replies: Sequence[Reply], first: int, what: str) -> RankError:
    """Return the error of a failed call. Names the lost ranks if there are any, since the others fail because of
    them."""
    who = [f"rank {rank} {reply}" for rank, reply in enumerate(replies) if isinstance(reply, str)]
    reply, note = replies[first], None
    if isinstance(reply, RankAnswer):
        note = reply.traceback if not who else None
        who = who or [f"rank {first} failed: {reply.problem}"]
    who += [f"rank {rank} did not answer and was ended" for rank, reply in enumerate(replies) if reply is None]
    error = RankError(
        f"a process of the trainer was lost ({what}, {len(replies)} processes): {'; '.join(who)}. "
        "The last checkpoint is whole: start the same again under the same name to continue from it"
    )
    if note is not None:
        error.add_note(f"rank {first}:\n{note}")
    return error
