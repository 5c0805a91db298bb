"""Refusal of requests that come from web pages: the gateway is for programs.

In: a request's headers. Out: a 403 for what a page in the owner's browser sends, be it one of another site, or one that
had its own name lead to this machine (DNS rebinding).

Browsers say themselves that a page asks: by `Origin` (each request but simple ones for images, scripts and the like),
by `Sec-Fetch-Site` (those, to this machine), and by `Host`, which has the page's name where that leads here. A server
on the loopback knows its own names; one for other machines does not, and is protected by the first two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from sharpen.config.sections import GatewayConfig
from sharpen.gateway.replies import send_whole
from sharpen.gateway.requests import ApiError, short_repr
from sharpen.gateway.routes import OURS

_OWN = (b"none", b"same-origin")
"""What `Sec-Fetch-Site` says where no page of another site asks: its owner typed the address."""


def without_web_pages(app: ASGIApp, config: GatewayConfig) -> ASGIApp:
    """Return the application as programs see it; web pages are refused."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        reason = refusal(scope["headers"], loopback=config.is_loopback)
        if reason is None:
            await app(scope, receive, send)
        else:
            error = ApiError(reason, status=403, code="web_page", kind="permission_error")
            await send_whole(send, OURS.refusal(error, scope["path"]), close=True)

    return checked


def refusal(headers: Iterable[tuple[bytes, bytes]], *, loopback: bool) -> str | None:
    """Return why a request is not answered; None if it may come from a program. `loopback`: the server listens there
    alone."""
    for name, value in headers:
        if name == b"origin" or (name == b"sec-fetch-site" and value not in _OWN):
            return f"Web pages are not answered ({name.decode()}: {short_repr(value.decode('latin-1'))})."
        if name == b"host" and loopback and not _is_here(value.decode("latin-1")):
            return (
                f"This server listens on the loopback alone, where {short_repr(value.decode('latin-1'))} is not its "
                "name: use localhost or 127.0.0.1, or set gateway.host."
            )
    return None


@functools.lru_cache(64)
def _is_here(authority: str) -> bool:
    """Whether a `Host` may lead to this machine without a page's doing: an address, a name of the loopback, or none at
    all. Names below `internal`, by which containers know their host, are nobody's on the internet."""
    host = authority.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") <= 1:
        host = host.partition(":")[0]
    host = host.removesuffix(".")
    if host in ("", "localhost") or host.endswith((".localhost", ".internal")):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
