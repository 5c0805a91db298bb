"""The keys of rollouts, and the error for a request with no valid key.

In: path and headers; the start and end of rollouts. Out: the key; a 401 that distinguishes three cases: no key, an
unknown key, and the key of a rollout that has ended.
"""

from __future__ import annotations

import re
import secrets
import weakref
from typing import Any, Generic, Protocol, TypeVar

from sharpen.errors import ConfigError
from sharpen.gateway.caller import Caller, describe_foreign_use
from sharpen.gateway.requests import ApiError

BEARER = re.compile(r"\s*bearer(\s+|$)", re.IGNORECASE)
OTHER_HEADERS = ("x-api-key", "api-key", "x-goog-api-key")
HOW = (
    "send model.api_key as 'Authorization: Bearer <key>' (or as x-api-key, api-key or x-goog-api-key), or use "
    "model.keyed_url, whose path has the key"
)
MAX_ENDED = 1000
"""How many keys of ended rollouts are remembered, for better error messages: some 0.4 KB each."""
PREFIX = "at-"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_key() -> str:
    """Return a new random key."""
    return f"{PREFIX}{secrets.token_urlsafe(24)}"


def with_name(key: str, name: str) -> str:
    """Return the key of one of a rollout's agents. Raises `ConfigError` for a name that is none."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"an agent's name is up to 64 letters, digits, '-' and '_', not {name!r}")
    return f"{key}.{name}"


def without_name(key: str) -> tuple[str, str]:
    """Split a key into that of the rollout and the agent's name (empty if it has none)."""
    if not key.startswith(PREFIX):
        return key, ""
    own, _, name = key.partition(".")
    return own, name


def without_key(path: str) -> tuple[str, str]:
    """Split a request's path into the key that it begins with (empty if there is none) and the path that is left."""
    first, slash, rest = path.removeprefix("/").partition("/")
    return (first, slash + rest) if first.startswith(PREFIX) else ("", path)


def key_of(headers: Any) -> str:
    """Return the key in a request's headers (any case-insensitive mapping); empty if there is none."""
    key = BEARER.sub("", headers.get("authorization", ""), count=1).strip()
    return key or next((value.strip() for name in OTHER_HEADERS if (value := headers.get(name))), "")


class Holder(Protocol):
    """What a key belongs to: one attempt's session with a model."""

    @property
    def rollout_id(self) -> str: ...
    @property
    def owner(self) -> Caller | None: ...


H = TypeVar("H", bound=Holder)


class Keys(Generic[H]):
    """The valid keys with their holders, and the rollouts of the last `MAX_ENDED` ended keys. From any thread."""

    def __init__(self) -> None:
        self._holders: dict[str, H] = {}
        self._ended: dict[str, tuple[str, weakref.ref[Caller] | None]] = {}

    def add(self, key: str, holder: H) -> None:
        """Make a key valid for a holder."""
        self._holders[key] = holder

    def holder(self, key: str) -> H | None:
        """Return the holder of a key; None if the key is not valid."""
        return self._holders.get(key)

    def holders(self) -> list[H]:
        """Return the holders of all valid keys."""
        return list(self._holders.values())

    def end(self, key: str) -> None:
        """Make a key invalid."""
        holder = self._holders.pop(key, None)
        if holder is None:
            return
        self._ended[key] = (holder.rollout_id, None if holder.owner is None else weakref.ref(holder.owner))
        while len(self._ended) > MAX_ENDED:
            self._ended.pop(next(iter(self._ended)), None)

    def refusal(self, key: str, caller: Caller | None) -> ApiError:
        """Return the error for an invalid key. If another rollout's code sent it, that rollout fails too."""
        if not key:
            return _unauthorized(f"This request has no key: {HOW}.", "missing_api_key")
        if key not in self._ended:
            return _unauthorized(
                f"This key belongs to no rollout of this run (their keys begin with {PREFIX!r}; did it come from "
                f"OPENAI_API_KEY, or from another run?), or to one that ended long ago: {HOW}.",
                "invalid_api_key",
            )
        rollout_id, owner = self._ended[key]
        message = f"Rollout {rollout_id} has ended, and its key is no longer valid."
        if owner is not None and caller is not None and owner() is not caller:
            message = f"{message} {describe_foreign_use(rollout_id, caller.label)}"
            caller.fail(message)
        return _unauthorized(message, "invalid_api_key")


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(message, status=401, code=code, kind="authentication_error")
