"""What applications say of their sessions: the bodies of `POST /sessions` and `POST /feedback`.

In: a request. Out: `Opening` and `Feedback`, or `ApiError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharpen.gateway.body import decode
from sharpen.gateway.exchange import RawRequest
from sharpen.gateway.requests import ApiError, boolean, given_fields, short_repr

MAX_TASK_ID = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A session to be opened. `task_id` is None if none is named."""

    task_id: str | None
    row: Mapping[str, Any]

    @classmethod
    def of(cls, raw: RawRequest) -> Opening:
        """Read a request, whose body may be empty. Raises `ApiError`."""
        given = given_fields(decode(raw.body)) if raw.body else {}
        _refuse_others(given, ("task_id", "task"))
        task_id, row = given.get("task_id"), given.get("task", {})
        if task_id is not None and not (isinstance(task_id, str) and 0 < len(task_id) <= MAX_TASK_ID):
            raise ApiError(
                f"'task_id' is {short_repr(task_id)}; it must be a text of at most {MAX_TASK_ID} characters.",
                param="task_id",
            )
        if not isinstance(row, dict):
            raise ApiError(f"'task' is {short_repr(row)}; it must be an object.", param="task")
        return cls(task_id=task_id, row=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What a session, or one of its calls, is worth; exactly one of `session` and `call` (the id of an answer) is
    given. `reward` is None for a session that only ends."""

    session: str | None
    call: str | None
    reward: float | None
    end: bool

    @classmethod
    def of(cls, raw: RawRequest) -> Feedback:
        """Read a request. Raises `ApiError`."""
        given = given_fields(decode(raw.body))
        _refuse_others(given, ("session", "call", "reward", "end"))
        session, call, reward = given.get("session"), given.get("call"), given.get("reward")
        if (session is None) == (call is None):
            raise ApiError("Feedback is for a 'session' or for a 'call': name one of them by its id.", param="session")
        for name, value in (("session", session), ("call", call)):
            if not isinstance(value, str | None):
                raise ApiError(f"'{name}' is {short_repr(value)}; it must be a text.", param=name)
        end = boolean(given, "end") if "end" in given else call is None
        if (reward is None and not end) or (reward is not None and not _is_finite(reward)):
            raise ApiError(f"'reward' is {short_repr(reward)}; it must be a finite number.", param="reward")
        return cls(session=session, call=call, reward=None if reward is None else float(reward), end=end)


def unknown(what: str, value: str, why: str) -> ApiError:
    """Return the error for a session or a call that is not here."""
    return ApiError(f"There is no {what} {short_repr(value)} here: {why}.", status=404, code="not_found", param=what)


def _is_finite(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _refuse_others(given: dict[str, Any], known: tuple[str, ...]) -> None:
    if others := sorted(set(given) - set(known)):
        raise ApiError(f"{short_repr(others[0])} is not known here; known are {', '.join(known)}.", param=others[0])
