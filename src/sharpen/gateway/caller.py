"""Detection of calls that one rollout's code makes with another rollout's client.

Such a call has the messages of one task and would be trained with the reward of another.

In: a function that returns the attempt the running code belongs to (the room `rollout` knows; None if unknown, as in a
plain thread or another process). Out: the error message for a foreign call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sharpen.gateway.requests import ApiError


class Caller(Protocol):
    """A running attempt of a rollout. `fail` makes it fail, even if its code catches the error of the refused call."""

    @property
    def label(self) -> str: ...
    def fail(self, reason: str) -> None: ...


WhoCalls = Callable[[], Caller | None]
"""Returns the attempt that the running code belongs to, or None if unknown."""


def nobody() -> None:
    """A `WhoCalls` for gateways without rollouts: the caller is always unknown."""


def foreign_use(owner: Caller | None, caller: Caller | None) -> str | None:
    """If `caller` uses the client of another attempt `owner`, fail both and return the reason; else return None."""
    if owner is None or caller is None or owner is caller:
        return None
    reason = describe_foreign_use(owner.label, caller.label)
    for attempt in (owner, caller):
        attempt.fail(reason)
    return reason


def describe_foreign_use(owner: str, caller: str) -> str:
    """Return the message for a foreign call: what happened, and how to give each rollout its own client."""
    within = f"rollout {caller}" if caller != owner else "another attempt of it"
    return (
        f"the model of rollout {owner} was called from within {within}: its client, or its base_url and api_key, is "
        "set where all rollouts share it (set_default_openai_client, dspy.configure, Settings.llm, os.environ, a "
        "global variable). Make each rollout's agent from the `model` that its own workflow received "
        "(docs/use/agentscope.md, Other frameworks)"
    )


def foreign_error(reason: str) -> ApiError:
    """Return the 403 error that answers a foreign call."""
    return ApiError(reason, status=403, code="foreign_rollout", kind="permission_error")
