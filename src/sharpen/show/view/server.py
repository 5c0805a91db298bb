"""The server of the pages: on the loopback of this machine, for whoever has the token.

In: a library. Out: a server, until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from sharpen.errors import ConfigError, JournalError
from sharpen.interrupts import stop_signals
from sharpen.show.view.index import IndexMadeAnewError
from sharpen.show.view.library import Library
from sharpen.show.view.pages import Pages
from sharpen.show.view.security import Gate

HOST = "127.0.0.1"


def make_app(
    library: Library,
    *,
    token: str,
    port: int,
    price_per_hour: float | None = None,
    ending: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """Return the application."""
    pages = Pages(library, price_per_hour, ending)
    app = Starlette(
        routes=pages.routes,
        exception_handlers={
            HTTPException: pages.refused,
            IndexMadeAnewError: pages.made_anew,
            JournalError: pages.unreadable,
        },
    )
    return Gate(app, token, port)


def serve(library: Library, *, port: int, opened: Callable[[str], None], price_per_hour: float | None = None) -> None:
    """Serve until told to end. `opened` receives the address with its token. Raises `ConfigError` if the port is
    taken."""
    listener = _listen(port)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    server: uvicorn.Server | None = None

    def ending() -> bool:
        return server is not None and server.should_exit

    app = make_app(library, token=token, port=port, price_per_hour=price_per_hour, ending=ending)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",  # which bounds the headers of a request
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
    )
    with listener, stop_signals(), contextlib.suppress(KeyboardInterrupt):
        opened(f"http://{HOST}:{port}/?token={token}")
        server.run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port {port}: cannot listen there ({error}); give another one (0 is any free one)"
        ) from error
