"""Scripted HTTP servers on this machine, of `http.server`. In: what answers requests. Out: a server for the time of a
block, which takes all connections that come at once and ends when it is told to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """With one connection too many for its queue (5 places by default), a client tries again a second later."""

    request_queue_size = 128

    @property
    def address(self) -> str:
        """Its URL, without a path."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running(server: Server) -> Iterator[None]:
    """Let a server answer."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    with server:
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the URL, without a path, of a server whose requests are handled so."""
    server = Server(("127.0.0.1", 0), handler)
    with running(server):
        yield server.address
