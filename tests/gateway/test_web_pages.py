"""Web pages in the owner's browser do not reach the gateway: another site's, or one whose name leads here."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from sharpen.config.sections import GatewayConfig
from sharpen.gateway.listening import refusal

EVERYWHERE = GatewayConfig(host="0.0.0.0")


def ask(session: Any, headers: dict[str, str]) -> httpx.Response:
    return httpx.get(f"{session.model.base_url}/models", headers={"x-api-key": session.model.api_key, **headers})


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://site.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
@pytest.mark.parametrize("listen", [GatewayConfig(), EVERYWHERE])
def test_what_a_page_sends_is_refused(serve: Any, headers: dict[str, str], listen: GatewayConfig) -> None:
    session = serve("hi", listen=listen).open()
    assert ask(session, {}).status_code == 200
    refused = ask(session, headers)
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert error["type"] == "permission_error"
    assert next(iter(headers.values())) in error["message"]
    assert "access-control-allow-origin" not in refused.headers
    preflight = httpx.options(f"{session.model.base_url}/chat/completions", headers=headers)
    assert preflight.status_code == 403


@pytest.mark.parametrize("host", ["site.example", "site.example:8000", "192.0.2.7.example", "localhost.site.example"])
def test_another_name_that_leads_to_the_loopback_is_refused(serve: Any, host: str) -> None:
    refused = ask(serve("hi").open(), {"host": host})
    assert refused.status_code == 403
    assert host in refused.json()["error"]["message"]
    assert "gateway.host" in refused.json()["error"]["message"]
    assert ask(serve("hi", listen=EVERYWHERE).open(), {"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost:1", "127.0.0.1:9", "[::1]:9", "a.localhost.", "host.docker.internal:1", ""),
        *("0.0.0.0:8000", "10.0.2.2:8000", "[::ffff:127.0.0.1]:9"),
    ],
)
def test_names_that_no_page_can_lead_here(host: str) -> None:
    """Those by which Docker's and Podman's containers know a host are among them, and all addresses."""
    assert refusal([(b"host", host.encode())], loopback=True) is None


def test_clients_that_are_no_browsers_may_say_what_browsers_say() -> None:
    """Node's `fetch` does; an address that was typed is its owner's own request."""
    assert refusal([(b"sec-fetch-mode", b"cors"), (b"sec-fetch-site", b"none")], loopback=True) is None
