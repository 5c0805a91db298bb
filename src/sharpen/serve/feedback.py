"""What applications say of their sessions: the bodies of `POST /sessions` and `POST /feedback`.

In: a request. Out: `Opening` and `Feedback`, or `ApiError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from sharpen.gateway.body import decode
from sharpen.gateway.door import CLOSED, Door, Text, Truth, openai_place
from sharpen.gateway.exchange import RawRequest
from sharpen.gateway.requests import ApiError, given_fields, short_repr

MAX_TASK_ID = 200


@with_config(CLOSED)
class OpeningRequest(TypedDict, total=False):
    """The body of `POST /sessions`."""

    task_id: Annotated[str, Field(min_length=1, max_length=MAX_TASK_ID)] | None
    task: dict[str, Any] | None


@with_config(ConfigDict(**CLOSED, json_schema_extra={"oneOf": [{"required": ["session"]}, {"required": ["call"]}]}))
class FeedbackRequest(TypedDict, total=False):
    """The body of `POST /feedback`, for either a session or a call."""

    session: Text
    call: Text
    reward: float | None
    end: Truth


OPENING, FEEDBACK = Door(OpeningRequest, openai_place), Door(FeedbackRequest, openai_place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A session to be opened. `task_id` is None if none is named."""

    task_id: str | None
    row: Mapping[str, Any]

    @classmethod
    def of(cls, raw: RawRequest) -> Opening:
        """Read a request, whose body may be empty. Raises `ApiError`."""
        body = decode(raw.body) if raw.body else {}
        OPENING.check(body)
        given = given_fields(body)
        return cls(task_id=given.get("task_id"), row=given.get("task", {}))


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
        body = decode(raw.body)
        FEEDBACK.check(body)
        given = given_fields(body)
        session, call, reward = given.get("session"), given.get("call"), given.get("reward")
        if (session is None) == (call is None):
            raise ApiError("Feedback is for a 'session' or for a 'call': name one of them by its id.", param="session")
        end = given.get("end", call is None)
        if reward is None and not end:
            raise ApiError("'reward' is None; it must be a finite number.", param="reward")
        return cls(session=session, call=call, reward=None if reward is None else float(reward), end=end)


def unknown(what: str, value: str, why: str) -> ApiError:
    """Return the error for a session or a call that is not here."""
    return ApiError(f"There is no {what} {short_repr(value)} here: {why}.", status=404, code="not_found", param=what)
