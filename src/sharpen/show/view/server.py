"""The server of the pages: on the loopback of this machine, for whoever has the token.

In: a library. Out: a server, until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import hmac
import html
import secrets
import socket
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sharpen.errors import ConfigError, JournalError
from sharpen.interrupts import stop_signals
from sharpen.show.view.index import IndexMadeAnewError
from sharpen.show.view.library import Library
from sharpen.show.view.pages import Pages

# Who may read the pages: a browser on this machine that was given the token, and no page of another site.
#
# In: each HTTP request. Out: the request, if it may pass, and headers that keep the pages to themselves. Three things
# are checked, since each closes another door:
#
#     Host          must name the loopback: a site whose name was made to resolve to 127.0.0.1 sends its own name
#     Origin        must be ours where a browser says it (and `Sec-Fetch-Site`): no other site's script, nor one of
#                   another port of this machine
#     token         in a cookie that scripts cannot read and other sites' requests do not carry, set by the opened URL;
#                   or as `Authorization: Bearer`, for programs

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
TOKEN = "token"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""No script or style but our own files: what a rollout's text smuggled into a page would stay text."""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Gate:
    """Lets requests through to `app` that carry `token`. `port` makes the cookie's name: cookies do not tell the ports
    of a machine apart, and several views may be open."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"sharpen-view-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        assert scope["type"] == "http", "the server has no lifespan and no websockets"
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if _host_name(headers.get("host", "")) not in LOOPBACK:
            return _plain(403, "This page is served to this machine only: open it as http://127.0.0.1 or localhost.")
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get(TOKEN)
        opened = given is not None and scope["method"] == "GET"
        if not _same_origin(headers, opened=opened):
            return _plain(403, "This page answers no other site.")
        if opened:
            return self._enter(scope["path"], str(given), query)
        if not self._equal(self._token_of(headers)):
            return _plain(401, "No token: open the address that was printed.")
        return None

    def _enter(self, path: str, given: str, query: list[tuple[str, str]]) -> Response:
        """Set the cookie and go on to the same address without the token. Not by a redirect: a browser that came here
        from another site (a terminal in a page) would not send the new cookie along with it."""
        if not self._equal(given):
            return _plain(401, "The token is not that of this server: open the address that was printed.")
        rest = urlencode([pair for pair in query if pair[0] != TOKEN])
        # One slash at the beginning: two would name another host.
        target = html.escape("/" + quote(path.lstrip("/")) + (f"?{rest}" if rest else ""))
        page = (
            f'<!doctype html><title>sharpen view</title><meta http-equiv="refresh" content="0;url={target}">'
            '<link rel="icon" href="/static/icon.svg">'
            f'<a href="{target}">Open the runs</a>'
        )
        response = HTMLResponse(page)
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return response

    def _token_of(self, headers: Headers) -> str:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return bearer.strip()
        return cookie_parser(headers.get("cookie", "")).get(self._cookie, "")

    def _equal(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    return (
        host[: host.index("]") + 1].lower() if host.startswith("[") and "]" in host else host.partition(":")[0].lower()
    )


def _same_origin(headers: Headers, *, opened: bool) -> bool:
    """Whether no other site asks. A browser may be sent to the address with the token from anywhere, as a page: the
    terminal may itself be a page."""
    if (origin := headers.get("origin")) is not None and origin != f"http://{headers.get('host')}":
        return False
    site = headers.get("sec-fetch-site", "none")
    return site in ("same-origin", "none") or (opened and headers.get("sec-fetch-dest") == "document")


def _plain(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status_code=status)


def _with_headers(send: Send) -> Send:
    """Add our headers to each answer, also to refusals."""
    added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message.get("headers", ())}
            message["headers"] = [*message.get("headers", ()), *(pair for pair in added if pair[0] not in own)]
        await send(message)

    return send_with_headers


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

    def make(token: str, port: int, ending: Callable[[], bool]) -> ASGIApp:
        return make_app(library, token=token, port=port, price_per_hour=price_per_hour, ending=ending)

    serve_app(make, port=port, opened=opened)


def serve_app(
    make: Callable[[str, int, Callable[[], bool]], ASGIApp], *, port: int, opened: Callable[[str], None]
) -> None:
    """Serve what `make` makes of a token, the port, and whether the server is about to end; see `serve`."""
    listener = _listen(port)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    server: uvicorn.Server | None = None

    def ending() -> bool:
        return server is not None and server.should_exit

    server = uvicorn.Server(
        uvicorn.Config(
            make(token, port, ending),
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
