"""Whose a request is: the keys of rollouts, and calls that one rollout's code makes with another rollout's client.

Such a call has the messages of one task and would be trained with the reward of another. A client in this process knows
whose code calls it; over HTTP, the code that opened the connection is the caller.

In: path and headers; the start and end of rollouts; a function that returns the attempt the running code belongs to
(the room `rollout` knows; None if unknown, as in a plain thread or another process). Out: the key, or a 401 that
distinguishes no key, an unknown key, and the key of a rollout that has ended; the error message for a foreign call.
"""

from __future__ import annotations

import re
import secrets
import socket
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from sharpen.errors import ConfigError
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


# Finds the rollout whose code opened a connection to the loopback server.
#
# In: connections opened in this process (a Python audit hook runs in the opener's context), and the peer port of an
# accepted connection. Out: the attempt whose code opened it, or None if unknown: a thread that does not inherit its
# context, an event loop or client not built on Python's sockets, another process.
#
# A client could reuse a connection for another rollout. The server therefore closes a connection with a known opener
# after one response, so that its opener is also the sender of its only request.

_by_port: weakref.WeakValueDictionary[int, Connections] = weakref.WeakValueDictionary()
"""The `Connections` of each listening port."""
_hook_installed = False
MAX_UNUSED = 1024
"""With more connections than this that sent no request, closed ones are removed; again, once they are twice as many as
were left."""


class Connections:
    """The connections that code of this process opens to one local port."""

    def __init__(self, port: int, who_calls: WhoCalls) -> None:
        self._who_calls = who_calls
        self._opening: deque[tuple[weakref.ref[socket.socket], Caller]] = deque()
        self._opened: dict[int, tuple[weakref.ref[socket.socket], Caller]] = {}
        self._most = MAX_UNUSED
        _by_port[port] = self
        _install_hook()

    def note(self, connecting: socket.socket) -> None:
        """Record who is about to connect a socket. From any thread."""
        caller = self._who_calls()
        if caller is not None:
            self._opening.append((weakref.ref(connecting), caller))

    def opener(self, port: int) -> Caller | None:
        """Return who opened the connection from this client port. Call once for each connection, on one thread."""
        for _ in range(len(self._opening)):
            reference, caller = self._opening.popleft()
            bound = _local_port(reference)
            if bound == 0:  # still connecting
                self._opening.append((reference, caller))
            elif bound is not None:
                self._opened[bound] = (reference, caller)
        if len(self._opened) > self._most:
            self._opened = {one: opened for one, opened in self._opened.items() if _local_port(opened[0]) == one}
            self._most = max(MAX_UNUSED, 2 * len(self._opened))
        opened = self._opened.pop(port, None)
        if opened is None or _local_port(opened[0]) != port:  # closed, and the port is another's now
            return None
        return opened[1]


def _local_port(reference: weakref.ref[socket.socket]) -> int | None:
    """Return a socket's local port: 0 before it is bound, None once it is closed."""
    opened = reference()
    try:
        return None if opened is None else int(opened.getsockname()[1])
    except OSError:
        return None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event != "socket.connect":
        return
    connecting, address = args
    if isinstance(address, tuple) and isinstance(connecting, socket.socket):
        connections = _by_port.get(address[1])
        if connections is not None:
            connections.note(connecting)


def _install_hook() -> None:
    """Install the audit hook once per process: it cannot be removed."""
    global _hook_installed
    if not _hook_installed:
        _hook_installed = True
        sys.addaudithook(_hook)


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
