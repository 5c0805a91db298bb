"""Whose code opened a connection to the loopback server: what is known of clients that speak HTTP.

In: connections that are opened in this process (Python says so to audit hooks, in the context of who opens one), and
the peer of one that was accepted. Out: the rollout whose code opened it; None where that is not known: a thread that
does not inherit its context, an event loop or client that is not Python's own, another process.

A client may use a connection again for another rollout; so the server closes those whose opener is known after each
answer, and who opened a connection has also made its one request.
"""

from __future__ import annotations

import socket
import sys
import weakref
from collections import deque
from typing import Any

from sharpen.gateway.caller import Caller, WhoCalls

_watched: weakref.WeakValueDictionary[int, Connections] = weakref.WeakValueDictionary()
"""By the port that is listened on."""
_hooked = False
MOST_UNASKED = 1024
"""More connections than this that sent no request are looked through for closed ones."""


class Connections:
    """Connections to one port of this machine that code of this process opens from now on."""

    def __init__(self, port: int, who_calls: WhoCalls) -> None:
        self._who_calls = who_calls
        self._opening: deque[tuple[weakref.ref[socket.socket], Caller]] = deque()
        self._opened: dict[int, tuple[weakref.ref[socket.socket], Caller]] = {}
        _watched[port] = self
        _install()

    def note(self, connecting: socket.socket) -> None:
        """A socket is about to be connected. On any thread."""
        caller = self._who_calls()
        if caller is not None:
            self._opening.append((weakref.ref(connecting), caller))

    def opener(self, port: int) -> Caller | None:
        """Who opened the connection that comes from this port; asked once for each. On one thread."""
        for _ in range(len(self._opening)):
            reference, caller = self._opening.popleft()
            bound = _port(reference)
            if bound == 0:  # its connection is still being made
                self._opening.append((reference, caller))
            elif bound is not None:
                self._opened[bound] = (reference, caller)
        if len(self._opened) > MOST_UNASKED:
            self._opened = {one: opened for one, opened in self._opened.items() if _port(opened[0]) == one}
        found = self._opened.pop(port, None)
        if found is None or _port(found[0]) != port:  # closed, and the port is another's now
            return None
        return found[1]


def _port(reference: weakref.ref[socket.socket]) -> int | None:
    """The port that a socket has here, 0 before it has one; None once it is closed."""
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
        watching = _watched.get(address[1])
        if watching is not None:
            watching.note(connecting)


def _install() -> None:
    """Once in a process: an audit hook stays for its life."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hook)
