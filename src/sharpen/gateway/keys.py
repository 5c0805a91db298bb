"""A request's key: where it is looked for, and what a request is told whose key opens nothing.

In: headers; rollouts that begin and end. Out: the key; a 401 that says which of three it is: no key, a key that was
never one, or the key of a rollout that has ended.
"""

from __future__ import annotations

import re
import secrets
import weakref
from typing import Any, Generic, Protocol, TypeVar

from sharpen.gateway.caller import Caller, describe_foreign_use
from sharpen.gateway.requests import ApiError

BEARER = re.compile(r"\s*bearer(\s+|$)", re.IGNORECASE)
OTHER_HEADERS = ("x-api-key", "api-key")
HOW = "send model.api_key as 'Authorization: Bearer <key>' (or as x-api-key, or api-key)"
REMEMBERED = 10_000
BEGINNING = "at-"


def new_key() -> str:
    """A key that nobody can guess."""
    return f"{BEGINNING}{secrets.token_urlsafe(24)}"


def key_of(headers: Any) -> str:
    """The key in a request's headers (any mapping that ignores case); empty if there is none."""
    key = BEARER.sub("", headers.get("authorization", ""), count=1).strip()
    return key or next((value.strip() for name in OTHER_HEADERS if (value := headers.get(name))), "")


class Holder(Protocol):
    """What a key stands for: one attempt's use of a model."""

    @property
    def rollout_id(self) -> str: ...
    @property
    def owner(self) -> Caller | None: ...


H = TypeVar("H", bound=Holder)


class Keys(Generic[H]):
    """The keys that open something, and, of the last 10,000 that did, whose they were. From any thread."""

    def __init__(self) -> None:
        self._holders: dict[str, H] = {}
        self._ended: dict[str, tuple[str, weakref.ref[Caller] | None]] = {}

    def add(self, key: str, holder: H) -> None:
        """This key is the holder's."""
        self._holders[key] = holder

    def holder(self, key: str) -> H | None:
        """Whose key it is; None if it opens nothing."""
        return self._holders.get(key)

    def holders(self) -> list[H]:
        """All whose keys open something."""
        return list(self._holders.values())

    def end(self, key: str) -> None:
        """This key opens nothing from now on."""
        holder = self._holders.pop(key, None)
        if holder is None:
            return
        self._ended[key] = (holder.rollout_id, None if holder.owner is None else weakref.ref(holder.owner))
        while len(self._ended) > REMEMBERED:
            self._ended.pop(next(iter(self._ended)), None)

    def refusal(self, key: str, caller: Caller | None) -> ApiError:
        """Why a key opens nothing. Another rollout's code that has it fails for it."""
        if not key:
            return _unauthorized(f"This request has no key: {HOW}.", "missing_api_key")
        if key not in self._ended:
            return _unauthorized(
                f"This key was never a rollout's here (theirs begin with {BEGINNING!r}; did it come from "
                f"OPENAI_API_KEY, or from another run?): {HOW}.",
                "invalid_api_key",
            )
        rollout_id, owner = self._ended[key]
        message = f"Rollout {rollout_id} has ended, and its key with it."
        if owner is not None and caller is not None and owner() is not caller:
            message = f"{message} {describe_foreign_use(rollout_id, caller.label)}"
            caller.fail(message)
        return _unauthorized(message, "invalid_api_key")


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(message, status=401, code=code, kind="authentication_error")
