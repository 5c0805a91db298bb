"""Whose code makes a call: the rollout that a client serves, and the one that it is used from.

In: a function that says which rollout the running code belongs to (`rollout` knows it; None where that is not known: a
plain thread, another process). Out: the sentence for a call that comes from within another rollout. Such a call has
the messages of one task and would train with the reward of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sharpen.gateway.requests import ApiError


class Caller(Protocol):
    """A rollout's attempt, while its code runs. `fail` makes it fail, whatever its code does with the refusal."""

    @property
    def label(self) -> str: ...
    def fail(self, reason: str) -> None: ...


WhoCalls = Callable[[], Caller | None]
"""The attempt that the running code belongs to."""


def nobody() -> None:
    """Where there are no rollouts, nothing is known."""


def foreign_use(owner: Caller | None, caller: Caller | None) -> str | None:
    """If a call for one attempt is known to come from within another one: let both fail, and say why."""
    if owner is None or caller is None or owner is caller:
        return None
    reason = describe_foreign_use(owner.label, caller.label)
    for attempt in (owner, caller):
        attempt.fail(reason)
    return reason


def describe_foreign_use(owner: str, caller: str) -> str:
    """What happened, and how clients are set for each rollout."""
    within = f"rollout {caller}" if caller != owner else "another attempt of it"
    return (
        f"the model of rollout {owner} was called from within {within}: its client, or its base_url and api_key, is "
        "where all rollouts find it (set_default_openai_client, dspy.configure, Settings.llm, os.environ, a global "
        "variable). Make each rollout's agent from the `model` that its own workflow received (docs/use/agentscope.md, "
        "Other frameworks)"
    )


def foreign_error(reason: str) -> ApiError:
    """What the call gets."""
    return ApiError(reason, status=403, code="foreign_rollout", kind="permission_error")
