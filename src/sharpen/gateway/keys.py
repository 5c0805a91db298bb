"""A request's key: where it is looked for, and what a request is told whose key opens nothing.

In: headers; keys of rollouts that end. Out: the key; a 401 that says which of three it is: no key, a key that was never
one, or the key of a rollout that has ended.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

from sharpen.gateway.caller import Caller, describe_foreign_use
from sharpen.gateway.requests import ApiError

BEARER = re.compile(r"\s*bearer(\s+|$)", re.IGNORECASE)
OTHER_HEADERS = ("x-api-key", "api-key")
HOW = "send model.api_key as 'Authorization: Bearer <key>' (or as x-api-key, or api-key)"
REMEMBERED = 10_000


def key_of(headers: Any) -> str:
    """The key in a request's headers (any mapping that ignores case); empty if there is none."""
    key = BEARER.sub("", headers.get("authorization", ""), count=1).strip()
    return key or next((value.strip() for name in OTHER_HEADERS if (value := headers.get(name))), "")


class EndedKeys:
    """Keys of rollouts that have ended, the last 10,000 of them."""

    def __init__(self) -> None:
        self._ended: dict[str, tuple[str, weakref.ref[Caller] | None]] = {}

    def add(self, key: str, rollout_id: str, owner: Caller | None) -> None:
        """This key opens nothing from now on. From any thread."""
        self._ended[key] = (rollout_id, None if owner is None else weakref.ref(owner))
        while len(self._ended) > REMEMBERED:
            self._ended.pop(next(iter(self._ended)), None)

    def refusal(self, key: str, caller: Caller | None) -> ApiError:
        """Why a key opens nothing. Another rollout's code that has it fails for it."""
        if not key:
            return _unauthorized(f"This request has no key: {HOW}.", "missing_api_key")
        if key not in self._ended:
            return _unauthorized(
                "This key was never a rollout's here (theirs begin with 'at-'; did it come from OPENAI_API_KEY, or "
                f"from another run?): {HOW}.",
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
