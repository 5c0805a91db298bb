"""HTTP as it comes from wires: headers that are too long, in any pieces; odd requests; too many of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import resource
import socket
import threading
from typing import Any

import httpx
import pytest
import uvicorn
from scripted import eventually
from uvicorn.server import ServerState

from sharpen.config.sections import GatewayConfig
from sharpen.gateway.listening import HEAD_TIMEOUT_S, HttpProtocol, connection_limit, raise_file_limit
from sharpen.types import CallStatus

PATIENCE_S = 120
MAX_HEADER_BYTES = GatewayConfig().max_header_kb << 10
BODY = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "hello"}]}).encode()


def address(session: Any) -> tuple[str, int]:
    host, _, port = session.model.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    return host, int(port)


def head(session: Any, *more: bytes) -> bytes:
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"Host: localhost", b"x-api-key: " + session.model.api_key.encode()]
    return b"\r\n".join([*lines, *more])


def answers(session: Any, *parts: bytes, hang_up: bool = True) -> bytes:
    """All that the server says to these parts until it closes; without an answer it does so once we `hang_up`."""
    with socket.create_connection(address(session), timeout=PATIENCE_S) as client:
        try:
            for part in parts:
                client.sendall(part)
            if hang_up:
                client.shutdown(socket.SHUT_WR)
        except OSError:  # it has closed already: what it said is still there
            pass
        heard = b""
        try:
            while part := client.recv(1 << 16):
                heard += part
        except ConnectionResetError:
            pass
        return heard


PIECE = b"x-many: " + b"v" * 500 + b"\r\n"
TOO_MANY = MAX_HEADER_BYTES // len(PIECE) + 600


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([PIECE] * TOO_MANY, id="many headers"),
        pytest.param([PIECE * TOO_MANY + b"\r\n"], id="many headers at once"),
        pytest.param([b"x-endless: ", *[b"v" * 4096] * 100], id="one header without an end"),
        pytest.param(
            [b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n", *[PIECE] * TOO_MANY],
            id="trailers without an end",
        ),
    ],
)
def test_headers_without_an_end_are_refused(serve: Any, parts: list[bytes]) -> None:
    """By a 400, which the end of the connection may overtake: its reset is told then. Waiting is no refusal."""
    session = serve("hi").open()
    with socket.create_connection(address(session), timeout=PATIENCE_S) as client:
        try:
            client.sendall(head(session) + b"\r\n" + b"".join(parts))
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert session.close() == ()


def test_a_long_body_is_no_header(serve: Any) -> None:
    session = serve("hi").open()
    body = BODY + b" " * (4 * MAX_HEADER_BYTES)
    whole = head(session, b"content-length: %d" % len(body), b"connection: close") + b"\r\n\r\n" + body
    chunked = head(session, b"transfer-encoding: chunked", b"connection: close") + b"\r\n\r\n"
    chunked += b"%x\r\n%b\r\n0\r\nx-trailer: v\r\n\r\n" % (len(body), body)
    for request in (whole, chunked):
        assert answers(session, request, hang_up=False).startswith(b"HTTP/1.1 200 ")
    assert len(session.close()) == 2


def test_a_client_that_would_rather_speak_http_2_is_answered_again_and_again(serve: Any) -> None:
    """Java's client asks so in its first request, and goes on in HTTP/1.1 on the same connection."""
    session = serve("hi").open()
    upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAAB"}
    key = {"x-api-key": session.model.api_key}
    with contextlib.closing(http.client.HTTPConnection(*address(session), timeout=PATIENCE_S)) as client:
        client.connect()
        ours = client.sock
        for headers in (key | upgrade, key):
            client.request("POST", "/v1/chat/completions", BODY, headers)
            reply = client.getresponse()
            assert reply.status == 200
            assert json.loads(reply.read())["choices"][0]["message"]["content"] == "hi"
            assert client.sock is ours


@pytest.mark.parametrize(
    "request_",
    [
        b"no http\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: xchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff1\r\n",
        b"POST /v1/\xff HTTP/1.1\r\n\r\n",
        b"CONNECT here:80 HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n",
    ],
)
def test_what_is_no_request_is_a_400(serve: Any, request_: bytes) -> None:
    session = serve("hi").open()
    assert answers(session, request_).startswith(b"HTTP/1.1 400 ")


def test_half_a_request_is_no_call(serve: Any) -> None:
    session = serve("hi").open()
    assert answers(session, head(session, b"content-length: 500") + b"\r\n\r\n" + BODY) == b""
    assert answers(session, head(session)) == b""
    assert session.close() == ()


def test_requests_that_come_at_once_are_answered_in_turn(serve: Any) -> None:
    session = serve("hi").open()
    request = head(session, b"content-length: %d" % len(BODY)) + b"\r\n\r\n" + BODY
    last = head(session, b"content-length: %d" % len(BODY), b"connection: close") + b"\r\n\r\n" + BODY
    heard = answers(session, request * 3 + last, hang_up=False)
    assert heard.count(b"HTTP/1.1 200 ") == 4
    assert len(session.close()) == 4


def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on(serve: Any) -> None:
    session = serve("hi").open()
    asked = head(session, b"content-length: %d" % len(BODY), b"expect: 100-continue", b"connection: close")
    with socket.create_connection(address(session), timeout=PATIENCE_S) as client:
        client.sendall(asked + b"\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")
        client.sendall(BODY)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_connection_too_many_is_told_to_come_back(serve: Any) -> None:
    session = serve("hi", listen=GatewayConfig(max_connections=1)).open()
    with contextlib.closing(http.client.HTTPConnection(*address(session), timeout=PATIENCE_S)) as first:
        for _ in range(2):
            first.request("POST", "/v1/chat/completions", BODY, {"x-api-key": session.model.api_key})
            reply = first.getresponse()
            assert (reply.status, json.loads(reply.read())["object"]) == (200, "chat.completion")
            assert answers(session, hang_up=False).startswith(b"HTTP/1.1 429 ")


def test_files_are_left_for_others() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = connection_limit(GatewayConfig(max_connections=1 << 40))
    assert limit == (1 << 40 if files == resource.RLIM_INFINITY else files // 2)
    assert connection_limit(GatewayConfig(max_connections=3)) == 3


class Wire(asyncio.Transport):
    """A connection of which nothing is read."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_headers_that_do_not_arrive_are_given_up() -> None:
    """Also those of a second request, whose first byte came. An idle one is uvicorn's to close."""

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def connected(*parts: bytes) -> Any:
        loop = asyncio.get_running_loop()
        protocol = HttpProtocol(
            GatewayConfig(), config=uvicorn.Config(nothing, lifespan="off"), server_state=ServerState(), app_state={}
        )
        wire = Wire()
        wire.write = lambda data: None  # type: ignore[method-assign]
        protocol.connection_made(wire)
        for part in parts:
            protocol.data_received(part)
            await asyncio.gather(*protocol.tasks)
        waiting = [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        protocol.connection_lost(None)
        return [round(timer.when() - loop.time()) for timer in waiting]

    whole = b"GET / HTTP/1.1\r\n\r\n"
    assert asyncio.run(connected()) == [HEAD_TIMEOUT_S]
    assert asyncio.run(connected(b"GET / HT", b"TP/1.1\r\nhost:")) == [HEAD_TIMEOUT_S]
    assert asyncio.run(connected(whole)) == [5]  # uvicorn's, until the next request begins
    assert asyncio.run(connected(whole, b"G")) == [HEAD_TIMEOUT_S]
    refused = b"POST / HTTP/1.1\r\ncontent-length: 1000\r\n\r\n"  # which is answered before its body is there
    assert asyncio.run(connected(refused, b"half of it")) == [HEAD_TIMEOUT_S]


def test_requests_of_a_key_beyond_its_bound_are_told_to_come_back(serve: Any) -> None:
    begun, go_on = threading.Event(), asyncio.Event()

    served = serve("hi", listen=GatewayConfig(max_requests_per_key=1))
    slow = served.engine.generate

    async def generate(request: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await slow(request)

    served.engine.generate = generate
    one, other = served.open("g/0"), served.open("g/1")
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(post, one)
        assert begun.wait(PATIENCE_S)
        for path, kind in (("messages", "rate_limit_error"), ("chat/completions", "rate_limit_error")):
            refused = post(one, path)
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, kind)
        second = threads.submit(post, other)  # another's requests are counted for itself
        served.serving.loop.call_soon_threadsafe(go_on.set)
        assert (first.result().status_code, second.result().status_code) == (200, 200)
    assert post(one).status_code == 200


def post(session: Any, path: str = "chat/completions") -> httpx.Response:
    headers = {"x-api-key": session.model.api_key}
    return httpx.post(f"{session.model.base_url}/{path}", content=BODY, headers=headers, timeout=PATIENCE_S)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_asked_twice_and_hangs_up_aborts_what_it_asked(serve: Any, at_once: bool) -> None:
    """Red without `HttpProtocol._answered`: the first call went on until its answer was sampled. Red as well if reading
    stays paused after the second: the hang-up itself went unnoticed."""
    served = serve("hi")
    served.serving.call(served.engine.hold)
    session = served.open()
    request = head(session, b"content-length: %d" % len(BODY)) + b"\r\n\r\n" + BODY
    with socket.create_connection(address(session), timeout=PATIENCE_S) as client:
        client.sendall(request * (2 if at_once else 1))
        assert served.engine.waiting.acquire(timeout=PATIENCE_S)
        client.sendall(b"" if at_once else request)
    eventually(lambda: served.engine.cancelled == 1)
    assert [call.status for call in session.close()] == [CallStatus.ABANDONED]


def test_the_limit_of_files_is_raised_to_what_connections_need() -> None:
    """Red without `raise_file_limit`: a system's 1,024 made 512 connections of the 8,192 that are promised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (800, hard))
        raise_file_limit(GatewayConfig(max_connections=450))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (900, hard)
        raise_file_limit(GatewayConfig(max_connections=300))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (900, hard)
        assert connection_limit(GatewayConfig(max_connections=450)) == 450
        if hard != resource.RLIM_INFINITY:
            raise_file_limit(GatewayConfig(max_connections=hard))
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
