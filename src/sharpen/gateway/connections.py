"""Finds the rollout whose code opened a connection to the loopback server.

In: connections opened in this process (a Python audit hook runs in the opener's context), and the peer port of an
accepted connection. Out: the attempt whose code opened it, or None if unknown: a thread that does not inherit its
context, an event loop or client not built on Python's sockets, another process.

A client could reuse a connection for another rollout. The server therefore closes a connection with a known opener
after one response, so that its opener is also the sender of its only request.
"""

from __future__ import annotations

import socket
import sys
import weakref
from collections import deque
from typing import Any

from sharpen.gateway.caller import Caller, WhoCalls

_by_port: weakref.WeakValueDictionary[int, Connections] = weakref.WeakValueDictionary()
"""The `Connections` of each listening port."""
_hook_installed = False
MAX_UNUSED = 1024
"""With more connections than this that sent no request, closed ones are removed."""


class Connections:
    """The connections that code of this process opens to one local port."""

    def __init__(self, port: int, who_calls: WhoCalls) -> None:
        self._who_calls = who_calls
        self._opening: deque[tuple[weakref.ref[socket.socket], Caller]] = deque()
        self._opened: dict[int, tuple[weakref.ref[socket.socket], Caller]] = {}
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
        if len(self._opened) > MAX_UNUSED:
            self._opened = {one: opened for one, opened in self._opened.items() if _local_port(opened[0]) == one}
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
