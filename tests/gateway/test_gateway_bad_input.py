"""Bad input, protocol by protocol: the vendor's status and error shape, over HTTP and in the process; nobody waits."""

from __future__ import annotations

import copy
import json
import socket
import threading
from typing import Any

import httpx
import openai
import pytest
from scripted import generation, toy_tokenizer

from sharpen.gateway.exchange import RawRequest
from sharpen.gateway.render import Renderer

ASKED = "/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/messages"
SAID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "toy", "messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"model": "toy", "input": "hello"},
    "/v1/completions": {"model": "toy", "prompt": "hello"},
    "/v1/messages": {"model": "toy", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
}
LIMITS = dict(zip(ASKED, ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_tokens"), strict=True))
TEXTS = dict(zip(ASKED, ("messages", "input", "prompt", "messages"), strict=True))
IMAGE = "data:image/png;base64,AAAA"
IMAGES = {
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": IMAGE}},
    "/v1/responses": {"type": "input_image", "image_url": IMAGE},
    "/v1/messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}
SCHEMA = {"type": "object", "properties": {"x": {"type": 5}}}
TOOLS = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}},
    "/v1/responses": {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True},
    "/v1/messages": {"name": "f", "input_schema": SCHEMA, "strict": True},
}


def said(path: str, text: str) -> dict[str, Any]:
    """A request that says a text."""
    return dict(json.loads(json.dumps(SAID[path]).replace("hello", text)))


def wrong(path: str) -> dict[str, bytes]:
    """Requests of a protocol, each wrong in one way."""
    body = SAID[path]
    bodies: dict[str, Any] = {
        "a wrong type": {**body, TEXTS[path]: {"a": 1}},
        "no text": {**body, TEXTS[path]: []},
        "an unknown field": {**body, "colour": "red"},
        "no tokens": {**body, LIMITS[path]: 0},
        "tokens as text": {**body, LIMITS[path]: "many"},
        "too many tokens": {**body, LIMITS[path]: 2**40},
        "a temperature": {**body, "temperature": -1},
        "too long": said(path, "long " * 300),
        "far too long": said(path, "long " * 9000),
        "a list": [body],
    }
    if path in TOOLS:
        bodies["no schema"] = {**body, "tools": [TOOLS[path]]}
        spoken = copy.deepcopy(said(path, "?"))
        spoken[TEXTS[path]] = [{"role": "user", "content": [IMAGES[path]]}]
        bodies["an image"] = spoken
    encoded = {name: json.dumps(value).encode() for name, value in bodies.items()}
    return {
        **encoded,
        "half": json.dumps(body).encode()[:-9],
        "no JSON": b"hello",
        "nothing": b"",
        "bytes": b"\xff\xfe",
    }


def check_shape(path: str, status: int, error: Any, expected: int, kind: str) -> None:
    """The error is in the vendor's shape."""
    assert status == expected
    if path == "/v1/messages":
        assert set(error) == {"type", "error"}
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert error["error"]["message"]
    else:
        assert set(error) == {"error"}
        assert set(error["error"]) == {"message", "type", "param", "code"}
        assert error["error"]["type"] == kind
        assert error["error"]["message"]


@pytest.mark.parametrize("path", ASKED)
def test_every_wrong_request_is_the_vendor_s_400(serve: Any, path: str) -> None:
    """In the process and over HTTP alike."""
    served = serve("hi", max_model_len=400, tool_call_parser="qwen3_coder")

    async def ask(session: Any, body: bytes) -> Any:
        raw = RawRequest(method="POST", path=path, key=session.model.api_key, retry=0, body=body)
        return await served.gateway.start(raw)

    with httpx.Client() as client:
        for name, body in wrong(path).items():
            session = served.open()
            inside = served.serving.run(ask(session, body))
            headers = {"authorization": f"Bearer {session.model.api_key}"}
            outside = client.post(session.model.base_url.removesuffix("/v1") + path, content=body, headers=headers)
            assert outside.json() == json.loads(inside.body), name
            check_shape(path, outside.status_code, outside.json(), 400, "invalid_request_error")
            assert inside.status == 400
            assert ("context" in str(session.failure)) == ("too long" in name)
            assert session.close() == ()


@pytest.mark.parametrize("path", ASKED)
def test_every_wrong_key_is_the_vendor_s_401(serve: Any, path: str) -> None:
    served = serve("hi")
    ended, other = served.open("g/0"), served.open("g/1")
    ended.close()
    url = other.model.base_url.removesuffix("/v1") + path
    with httpx.Client() as client:
        for headers in ({}, {"x-api-key": "sk-of-a-vendor"}, {"x-api-key": ended.model.api_key}):
            found = client.post(url, json=SAID[path], headers=headers)
            check_shape(path, found.status_code, found.json(), 401, "authentication_error")
        assert client.post(url, json=SAID[path], headers={"x-api-key": other.model.api_key}).status_code == 200
    assert len(other.close()) == 1


class WatchedBackend:
    """A tokenizer that remembers the length of the longest text that it encoded."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.longest = backend, 0

    def __deepcopy__(self, _: Any) -> WatchedBackend:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.longest = max(self.longest, len(text))
        return self._backend.encode(text, **options)


class WatchedTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.backend_tokenizer = tokenizer, WatchedBackend(tokenizer.backend_tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("path", [*ASKED, "/v1/messages/count_tokens"])
@pytest.mark.parametrize("messages", [1, 4000])
def test_ten_megabytes_are_refused_by_their_beginning(serve: Any, tokenizer: Any, path: str, messages: int) -> None:
    """To encode them all took 49 seconds and 2 GB, and every rollout waited."""
    watched = WatchedTokenizer(tokenizer)
    served = serve("hi", tokenizer=watched, max_model_len=64)
    session = served.open()
    text = "the name of the tool is " * (10_000_000 // 24 // messages)
    body = said(path.removesuffix("/count_tokens"), text)
    if messages > 1 and "messages" in body:
        body["messages"] = body["messages"] * messages
    with httpx.Client() as client:
        url = session.model.base_url.removesuffix("/v1") + path
        found = client.post(url, json=body, headers={"x-api-key": session.model.api_key}, timeout=60)
    if path.endswith("count_tokens"):
        assert found.json()["input_tokens"] > 1_000_000
    else:
        check_shape(path, found.status_code, found.json(), 400, "invalid_request_error")
    assert watched.backend_tokenizer.longest < 5000
    session.close()


def test_the_number_of_tokens_is_told_from_the_beginning(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    text = "the name of the tool is " * 500
    assert renderer.count_if_over(text, len(renderer.encode(text)) // 2) is None
    assert renderer.count_if_over(text, 50) == pytest.approx(len(renderer.encode(text)), rel=0.05)


def test_a_client_that_does_not_read_holds_nobody_up(serve: Any) -> None:
    """Neither other rollouts nor the end: the server closes, though bytes of an answer still wait to be read. Red when
    `Server.stop` waits for all connections."""
    long = generation([5, 6], finish_reason="stop", text="x" * 8_000_000)
    served = serve(lambda request: long if request.sampling.max_tokens == 77 else "hi")
    session, other = served.open("g/0"), served.open("g/1")
    body = json.dumps({**SAID["/v1/chat/completions"], "stream": True, "max_tokens": 77}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: {session.model.api_key}\r\n"
    port = int(session.model.base_url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        assert client.recv(12) == b"HTTP/1.1 200"
        create = other.model.sync_client.chat.completions.create
        assert create(model="toy", messages=[{"role": "user", "content": "?"}]).choices[0].message.content == "hi"
        session.close()
        other.close()
        closed = threading.Thread(target=lambda: served.serving.run(served.gateway.close()), daemon=True)
        closed.start()
        closed.join(30)
        assert not closed.is_alive()


def test_a_model_that_is_not_there_is_the_vendor_s_404(serve: Any) -> None:
    session = serve("hi").open()
    with pytest.raises(openai.NotFoundError) as caught:
        session.model.sync_client.models.retrieve("gpt-none")
    assert caught.value.code == "model_not_found"
    assert session.model.sync_client.models.retrieve("toy").id == "toy"


def test_effort_reaches_a_template_that_reads_it(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = "{{ 'Effort: ' + (reasoning_effort or 'medium') }}{{ messages[0].content }}"
    session = serve("hi", tokenizer=tokenizer).open()
    client = session.model.sync_client
    client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "?"}], reasoning_effort="low")
    client.responses.create(model="toy", input="?", reasoning={"effort": "high"})
    prompts = [session.prompt_text(call) for call in range(2)]
    assert prompts == ["Effort: low?", "Effort: high?"]
    assert "no effect" not in caplog.text
    other = serve("hi").open().model.sync_client.chat.completions
    other.create(model="toy", messages=[{"role": "user", "content": "?"}], reasoning_effort="low", verbosity="low")
    assert "reasoning_effort has no effect" in caplog.text


def test_allowed_tools_of_chat_completions(serve: Any) -> None:
    session = serve("hi").open()
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sub")]
    named = [{"type": "function", "function": {"name": "sub"}}]
    create = session.model.sync_client.chat.completions.create
    for mode in ("auto", "required"):
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        create(model="toy", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice=choice)
    wrong_choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "odd", "tools": named}}
    with pytest.raises(openai.BadRequestError, match="allowed_tools"):
        create(model="toy", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice=wrong_choice)
    free, forced = session.close()
    assert free.constraint is None
    assert forced.constraint is not None
    assert "sub" in forced.constraint.grammar
    assert "add" not in forced.constraint.grammar
