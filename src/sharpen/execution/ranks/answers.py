"""What the ranks of a trainer answer to a call, wherever they are, and what is raised where one of them does not.

In: the answers as they come. Out: the results of all ranks; or the error that all of them raised alike; or `RankError`,
which names the rank that is to blame.
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
"""How long the other ranks may take to answer when one has failed: they may be about to say the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What a rank says: a result, an error of ours, or one line of any other error, and where it happened."""

    result: Any = None
    error: SharpenError | None = None
    failure: str | None = None
    traceback: str | None = None

    @property
    def problem(self) -> SharpenError | str | None:
        """What kept it from a result."""
        return self.failure or self.error


Reply: TypeAlias = RankAnswer | str | None
"""An answer; how the rank was lost, in a few words; None if it did not answer in time."""


def answer_of(serve: Callable[..., Any], *arguments: Any) -> RankAnswer:
    """What a rank says of a call. An error that is not ours is a failure of this rank."""
    try:
        return RankAnswer(result=serve(*arguments))
    except SharpenError as error:
        return RankAnswer(error=error)
    except Exception as error:
        line = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        return RankAnswer(failure=line, traceback=traceback.format_exc())


class RankCalls(ABC):
    """What both kinds of `ranks.group.Calls` have in common. A pending call of a rank is a `handle` of some type."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._broken: BaseException | None = None

    @abstractmethod
    def close(self) -> None:
        """See `Calls.close`."""

    @abstractmethod
    def _wait(self, handles: Sequence[Any], timeout_s: float | None) -> Sequence[Any]:
        """Those that are answered, or whose rank is lost; none if the time is up."""

    @abstractmethod
    def _receive(self, rank: int, handle: Any) -> Reply:
        """What came of a call that `_wait` gave."""

    def _check_open(self) -> None:
        """Raise what ended the ranks, if they are ended."""
        if self._broken is not None:
            raise self._broken

    def _answers(self, handles: Sequence[Any], what: str) -> list[Any]:
        """Every rank's result; see `Calls.call` for errors. `what` was called."""
        try:
            replies, first = self._collect(handles)
        except KeyboardInterrupt as error:
            self._broken = error  # answers of this call may still come: no further one can be made
            raise
        errors = [reply.error if isinstance(reply, RankAnswer) else None for reply in replies]
        if errors[0] is not None and all(errors):
            raise errors[0]
        if first is not None:
            self._broken = _blame(replies, first, what)
            self.close()
            raise self._broken
        return [reply.result for reply in replies if isinstance(reply, RankAnswer)]

    def _collect(self, handles: Sequence[Any]) -> tuple[list[Reply], int | None]:
        """What each rank says, as far as it comes within the time of grace after a failure; and which rank was the
        first without a result."""
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


def what_of(method: str, arguments: Sequence[Any]) -> str:
    """The name of a call for people: of the trainer's method where one is run."""
    return str(arguments[0]) if method == "run" else method


def _blame(replies: Sequence[Reply], first: int, what: str) -> RankError:
    """What to say of a call that failed. Ranks that lost another one fail too, which tells nothing."""
    who = [f"rank {rank} {reply}" for rank, reply in enumerate(replies) if isinstance(reply, str)]
    reply, note = replies[first], None
    if isinstance(reply, RankAnswer):
        note = reply.traceback if not who else None
        who = who or [f"rank {first} failed: {reply.problem}"]
    who += [f"rank {rank} did not answer and was ended" for rank, reply in enumerate(replies) if reply is None]
    error = RankError(
        f"a process of the trainer was lost ({what}, {len(replies)} processes): {'; '.join(who)}. "
        "The last checkpoint is whole: the same experiment_name goes on from there"
    )
    if note is not None:
        error.add_note(f"rank {first}:\n{note}")
    return error
