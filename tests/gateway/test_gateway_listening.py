"""Where the HTTP server listens: the loopback by default, other addresses for containers; what it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from sharpen.config.sections import GatewayConfig
from sharpen.errors import ConfigError
from sharpen.gateway.listening import AppServer, listen
from sharpen.gateway.requests import ApiError
from sharpen.gateway.server import read_body

ELSEWHERE = Path(__file__).with_name("elsewhere.py")


def namespaces() -> list[str]:
    """The command line that starts a process in a network namespace; empty where there are none for this user."""
    prefix = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net"]
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return []
    return prefix if subprocess.run([*prefix, "ip", "link"], capture_output=True).returncode == 0 else []


def test_an_agent_on_another_network(caplog: Any) -> None:
    """In real namespaces where this user may make them; else at another address of this machine."""
    prefix = namespaces()
    command = [*prefix, sys.executable, str(ELSEWHERE), "namespaces" if prefix else "here"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert json.loads(found["answer"])["choices"][0]["message"]["content"] == "hi"
    assert json.loads(found["without a key"])["error"]["code"] == "invalid_api_key"
    assert found["calls"] == [1, 0]
    if prefix:
        assert "onnect" in found["loopback"], "a gateway of the loopback is not reached"
        assert "gateway.host" in shown.stderr, "a line says that it listens"
    if sys.platform == "linux":
        assert "gateway.host is 127.0.0.1" in found["refused"]


def test_all_addresses(serve: Any, caplog: Any) -> None:
    """Agents of this machine use the loopback; others the name they know; a line says who can call now."""
    with caplog.at_level(logging.WARNING):
        session = serve("hi", listen=GatewayConfig(host="0.0.0.0")).open()
        assert session.model.base_url.startswith("http://127.0.0.1:")
    assert "0.0.0.0" in caplog.text
    for host in ("host.docker.internal", "fe80::1"):
        url = httpx.URL(session.model.environment(host)["OPENAI_BASE_URL"])
        assert (url.host, url.port) == (host, httpx.URL(session.model.base_url).port)
    key = {"authorization": f"Bearer {session.model.api_key}"}
    assert httpx.get(f"{session.model.base_url}/models", headers=key).status_code == 200
    assert httpx.get(f"{session.model.base_url}/models").status_code == 401


def test_a_port_is_fixed_and_taken_once(serve: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    listen = GatewayConfig(port=port)
    assert f":{port}/v1" in serve("hi", listen=listen).open().model.base_url
    with pytest.raises(ConfigError, match=f"gateway.port={port}.*0 finds one"):
        assert serve("hi", listen=listen).open().model.base_url


def test_an_address_of_another_machine(serve: Any) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        assert serve("hi", listen=GatewayConfig(host="192.0.2.1")).open().model.base_url
    with pytest.raises(ConfigError, match="IP address"):
        GatewayConfig(host="my-machine")


def test_a_body_that_is_too_large_is_refused(serve: Any) -> None:
    session = serve("hi", listen=GatewayConfig(max_body_mb=1)).open()
    headers = {"x-api-key": session.model.api_key}
    body = b" " * ((1 << 20) + 1)
    for route, kind in (("messages", "request_too_large"), ("chat/completions", "invalid_request_error")):
        with httpx.Client() as client:
            reply = client.post(f"{session.model.base_url}/{route}", content=body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, kind)
    assert session.close() == ()


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async def receive() -> Any:
        await asyncio.sleep(60)

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(ApiError) as error:
        asyncio.run(read_body(request, 1, timeout_s=0.05))
    assert error.value.status == 408


def test_an_answer_does_not_wait_for_the_client_to_acknowledge_its_headers():
    with listen(GatewayConfig()) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def with_a_request(answer_s: float, **of_server: Any) -> tuple[AppServer, asyncio.Task[httpx.Response]]:
    """A server that is answering a request, for so long."""
    asked = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await asyncio.sleep(answer_s)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def request() -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(f"http://127.0.0.1:{server.port}/")

    server = AppServer(app, GatewayConfig(), log_level="critical", **of_server)
    await server.start()
    asking = asyncio.create_task(request())
    await asked.wait()
    return server, asking


def test_a_server_ends_with_its_last_answer() -> None:
    """And takes no signal meanwhile. Red with uvicorn's own server, which ends 0.1 to 0.2 s later."""

    async def ended_after() -> float:
        before = signal.getsignal(signal.SIGINT)
        server, asking = await with_a_request(0.1)
        assert signal.getsignal(signal.SIGINT) is before
        ending = asyncio.create_task(server.stop())
        assert (await asking).status_code == 200
        answered = asyncio.get_running_loop().time()
        await ending
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)
        return asyncio.get_running_loop().time() - answered

    assert min(asyncio.run(ended_after()) for _ in range(3)) < 0.05


def test_an_answer_that_does_not_end_is_given_up() -> None:
    async def ended() -> None:
        server, asking = await with_a_request(600.0, grace_s=0.05)
        await server.stop()
        asking.cancel()

    asyncio.run(asyncio.wait_for(ended(), 60))
