"""Malformed requests are the agent's: a 400, never a failure of infrastructure, and nobody else notices."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from malformed import BODIES, bodies
from scripted import generation, toy_tokenizer

from sharpen.errors import SamplingError
from sharpen.gateway.body import MAX_DEPTH
from sharpen.gateway.exchange import RawRequest
from sharpen.types import MODEL_CAUSED

MALFORMED = int(os.environ.get("MALFORMED_REQUESTS", "80"))
"""How many are sent to each path."""
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def send(served: Any, session: Any, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, bytes]:
    """Status and body of the answer, without a client in between; of a stream, once it is complete."""

    async def ask() -> Any:
        key = session.model.api_key
        raw = RawRequest(method="POST", path=path, key=key, retry=0, body=body)
        reply = await served.gateway.start(raw)
        if reply.stream is not None:
            await reply.stream.task
        return reply

    reply = served.serving.run(ask())
    return reply.status, reply.body


@pytest.mark.parametrize("path", BODIES)
def test_the_request_that_is_changed_is_valid(serve: Any, path: str) -> None:
    served = serve("hi")
    assert send(served, served.open(), json.dumps(BODIES[path]).encode(), path)[0] == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("reparse", "parser"), [(False, "hermes"), (True, "qwen3_coder"), (False, "gemma4")])
def test_no_malformed_request_is_a_failure_of_ours(serve: Any, reparse: bool, parser: str, path: str) -> None:
    """Some of the thousands that were sent by hand (none gave a 500). Red where any check of `gateway.body` or of
    `requests` is taken out."""
    served = serve("hi", tokenizer=toy_tokenizer(reparse=reparse), tool_call_parser=parser)

    @settings(max_examples=MALFORMED, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(bodies(path))
    def check(body: bytes) -> None:
        session = served.open()
        status, answer = send(served, session, body, path)
        assert status in (200, 400), answer
        assert session.failure is None or session.failure in MODEL_CAUSED
        if status == 400:
            error = json.loads(answer)["error"]
            assert set(error) >= {"message", "type"}
            assert error["type"] == "invalid_request_error"
        session.close()

    check()


DEEP = "[" * 300 + "]" * 300
PLACED: list[tuple[str, str]] = [
    ('"temperature": 1' + "0" * 400, "temperature"),
    ('"temperature": 1e-9', "temperature"),
    ('"top_p": 1e-300', "top_p"),
    ('"seed": ' + "9" * 400, "seed"),
    ('"stop": ["\\ud800"]', "stop"),
    ('"stop": [["x"]]', "stop[0]"),
    ('"user": "\\ud800"', "user"),
    ('"metadata": {"\\udc00": 1}', "metadata"),
    ('"metadata": {"a": 1e999}', "metadata"),
    (f'"metadata": {DEEP}', "metadata"),
    (f'"tools": [{{"type": "function", "function": {{"name": "a", "parameters": {DEEP}}}}}]', "tools"),
    ('"tools": [{"type": "function", "function": {"name": "\\ud800"}}]', "tools"),
    ('"tool_choice": {"type": "function", "function": {"name": {}}}, "tools": []', "tool_choice.function.name"),
    ('"messages": [{"role": {}, "content": "x"}]', "messages[0].role"),
    ('"messages": [{"role": "user", "content": "\\ud800"}]', "messages"),
    ('"messages": [{"role": "user", "name": "\\ud800", "content": "x"}]', "messages"),
]


@pytest.mark.parametrize(("field", "param"), PLACED, ids=[f"{param}{at}" for at, (_, param) in enumerate(PLACED)])
def test_malformed_requests_name_the_parameter(serve: Any, field: str, param: str) -> None:
    served = serve("hi")
    session = served.open()
    start = '{"model": "toy", "messages": [{"role": "user", "content": "hello"}], '
    status, answer = send(served, session, (start + field + "}").encode())
    assert (status, json.loads(answer)["error"]["param"]) == (400, param)
    assert session.failure is None
    assert session.close() == ()


@pytest.mark.parametrize("body", ['{"a": NaN}', "9" * 5000, "[" * 100_000, '"\\ud800', "\ufeff{}"])
def test_invalid_json_is_a_400(serve: Any, body: str) -> None:
    served = serve("hi")
    status, answer = send(served, served.open(), body.encode("utf-8", "surrogatepass"))
    assert status == 400
    assert b"JSON" in answer


def test_nesting_within_the_limit_is_answered(serve: Any) -> None:
    served = serve("hi")
    schema: Any = {}
    for _ in range(MAX_DEPTH // 2):
        schema = {"properties": {"a": schema}} if len(str(schema)) < 400 else schema
    body = {"model": "toy", "messages": USER, "tools": [{"type": "function", "function": {"name": "a", "p": schema}}]}
    assert send(served, served.open(), json.dumps(body).encode())[0] == 200


def test_emoji_written_as_escapes_are_text(serve: Any, tokenizer: Any) -> None:
    served = serve("hi")
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "🙂"}]})
    assert "\\ud83d" in body
    assert send(served, served.open(), body.encode())[0] == 200
    assert "🙂" in tokenizer.decode(served.engine.requests[0].prompt_ids)


def test_sampling_that_the_engine_refuses_is_a_400(serve: Any) -> None:
    """Engines differ in what they can sample (vLLM). Red when `Gateway._choice` does not catch `SamplingError`."""

    def script(request: Any) -> Any:
        raise SamplingError("top_k must be at most 7 here")

    session = serve(script).open()
    with pytest.raises(openai.BadRequestError, match="at most 7") as caught:
        session.model.sync_client.chat.completions.create(model="toy", messages=USER)
    assert caught.value.code == "invalid_sampling"
    assert session.failure is None


@pytest.mark.parametrize("reparse", [False, True])
def test_arguments_with_a_lone_surrogate_are_kept_as_sampled(serve: Any, tokenizer: Any, reparse: bool) -> None:
    """The model wrote half of a surrogate pair, as an escape: valid JSON, whose value is no text. Its conversation goes
    on. Red when `_with_parsed_arguments` (gateway/render.py) takes every JSON."""
    served = serve(
        '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>',
        tokenizer=toy_tokenizer(reparse=reparse),
    )
    create = served.open().model.sync_client.chat.completions.create
    message = create(model="toy", messages=USER, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert call.function.arguments == '{"a": "\\ud800"}'
    sent_back = [
        *USER,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "4"},
    ]
    assert create(model="toy", messages=sent_back, tools=[TOOL]).choices[0].finish_reason == "tool_calls"


def test_a_function_name_with_a_lone_surrogate_is_not_a_call(serve: Any) -> None:
    session = serve('<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>').open()
    message = session.model.sync_client.chat.completions.create(model="toy", messages=USER, tools=[TOOL]).choices[0]
    assert message.message.tool_calls is None
    assert session.counts["tool_parse_errors"] == 1


def test_a_client_that_disconnects_within_its_body_causes_no_error(serve: Any, caplog: Any) -> None:
    """The client disconnects while sending its body. Red when `Server._endpoint` does not catch starlette's error."""
    session = serve("hi").open()
    port = int(session.model.base_url.split(":")[2].split("/")[0])

    async def main() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    asyncio.run(main())
    reply = httpx.get(f"{session.model.base_url}/models", headers={"api-key": session.model.api_key})
    assert reply.status_code == 200
    assert not caplog.records


def test_numbers_in_headers_may_be_anything(serve: Any) -> None:
    session = serve("hi").open()
    headers = {"Authorization": f"Bearer {session.model.api_key}", "x-stainless-retry-count": "9" * 5000}
    assert httpx.get(f"{session.model.base_url}/models", headers=headers).status_code == 200
    digits = {"x-stainless-retry-count": "9" * 5000, "x-api-key": "9" * 5000, "traceparent": "9" * 5000}
    assert httpx.get(f"{session.model.base_url}/models", headers=digits).status_code == 401


@pytest.mark.parametrize("path", BODIES)
def test_half_a_surrogate_pair_is_a_400_wherever_it_stands(serve: Any, path: str) -> None:
    """Beside a call of another rollout that is in flight, and goes on. Red when `body.decode` lets them pass: one in a
    stop string failed all calls."""
    served = serve("hi")
    bad, good = served.open("g/0"), served.open("g/1")
    served.serving.call(served.engine.hold)
    asked = json.dumps({"model": "toy", "messages": USER}).encode()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(send, served, good, asked)
        assert served.engine.waiting.acquire(timeout=120)
        for place in strings_of(BODIES[path]):
            body = copy.deepcopy(BODIES[path])
            target = body
            for step in place[:-1]:
                target = target[step]
            target[place[-1]] = "\ud800"
            status, answer = send(served, bad, json.dumps(body).encode(), path)
            assert (status, "surrogate" in json.loads(answer)["error"]["message"]) == (400, True), place
        served.serving.call(served.engine.release)
        assert waiting.result(120)[0] == 200
    assert (bad.failure, good.failure) == (None, None)


def strings_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all texts."""
    if isinstance(value, str):
        yield place
    for step, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from strings_of(inner, (*place, step))


def test_generations_are_unaffected(serve: Any) -> None:
    """A prompt of another rollout is answered while this one sends what it should not."""
    served = serve(lambda request: generation([5, 6], finish_reason="stop", text="x"))
    bad, good = served.open("g/0"), served.open("g/1")
    assert send(served, bad, b'{"model": "toy", "messages": [{"role": [], "content": "x"}]}')[0] == 400
    assert good.model.sync_client.chat.completions.create(model="toy", messages=USER).choices[0].message.content == "x"
