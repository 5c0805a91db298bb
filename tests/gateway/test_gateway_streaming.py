"""Streams: tokens reach the agent as they are sampled, add up to the recorded answer, and stop with the agent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import generation

from sharpen.gateway.formats.format import parse_text
from sharpen.gateway.formats.table import REASONING_FORMATS, TOOL_FORMATS
from sharpen.gateway.render import Renderer
from sharpen.gateway.sampler import AnswerReader
from sharpen.types import CallStatus, Outcome

USER = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited 30 s"
        time.sleep(0.005)


def step_by_step(served: Any) -> Callable[[int], None]:
    """Make the engine wait before each token; returns what lets it sample so many more."""
    semaphore = served.engine.step_by_step = asyncio.Semaphore(0)

    def allow(tokens: int) -> None:
        for _ in range(tokens):
            served.serving.call(semaphore.release)

    return allow


def test_text_arrives_before_the_answer_is_complete(serve: Any) -> None:
    served = serve("one two three")
    session = served.open()
    allow = step_by_step(served)
    allow(3)
    with session.model.sync_client.chat.completions.create(model="toy", messages=USER, stream=True) as stream:
        chunks = iter(stream)
        text = ""
        while not text:
            text += next(chunks).choices[0].delta.content or ""
        assert "one two three".startswith(text)
        assert text != "one two three"
        assert session.snapshot()[0].status == CallStatus.ABANDONED  # so far
        allow(100)
        text += "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "one two three"
    (call,) = session.close()
    assert call.status == CallStatus.USED
    assert call.response["content"] == text


def test_over_http_too(serve: Any) -> None:
    served = serve("one two three")
    session = served.open()
    allow = step_by_step(served)
    allow(3)
    with openai.OpenAI(base_url=session.model.base_url, api_key=session.model.api_key, max_retries=0) as client:
        chunks = iter(client.chat.completions.create(model="toy", messages=USER, stream=True))
        text = ""
        while not text:
            text += next(chunks).choices[0].delta.content or ""
        assert text != "one two three"
        allow(100)
        text += "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert (text, session.close()[0].status) == ("one two three", CallStatus.USED)


def test_reasoning_text_and_tool_calls_are_told_apart_as_they_come(serve: Any) -> None:
    session = serve(f"<think>\nlet me add\n</think>\n\nadding\n{CALL}").open()
    options: Any = {"model": "toy", "messages": USER, "tools": [TOOL], "stream": True}
    chunks = list(session.model.sync_client.chat.completions.create(**options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    content = [delta.content for delta in deltas if delta.content]
    assert ("".join(reasoning), "".join(content)) == ("let me add", "adding")
    assert len(reasoning) > 1
    assert len(content) > 1
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, "add", '{"a": 1}')]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("over_http", [False, True])
def test_an_agent_that_hangs_up_stops_the_sampling(serve: Any, over_http: bool) -> None:
    served = serve("one two three four five six")
    session = served.open()
    client = session.model.sync_client
    if over_http:
        client = openai.OpenAI(base_url=session.model.base_url, api_key=session.model.api_key, max_retries=0)
    step_by_step(served)(3)
    stream = client.chat.completions.create(model="toy", messages=USER, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: served.engine.cancelled == 1)
    client.close()
    assert [call.status for call in session.close()] == [CallStatus.ABANDONED]


def test_an_async_agent_that_is_cancelled_stops_the_sampling(serve: Any) -> None:
    served = serve("one two three four five six")
    session = served.open()
    step_by_step(served)(3)

    async def workflow() -> None:
        async with asyncio.timeout(0.3):
            async for _ in await session.model.client.chat.completions.create(model="toy", messages=USER, stream=True):
                pass

    with pytest.raises(TimeoutError):
        asyncio.run(workflow())
    until(lambda: served.engine.cancelled == 1)
    assert [call.status for call in session.close()] == [CallStatus.ABANDONED]


def test_a_rollout_that_ends_ends_its_streams_with_an_error(serve: Any) -> None:
    served = serve("one two three four five six")
    session = served.open()
    step_by_step(served)(3)
    stream = session.model.sync_client.chat.completions.create(model="toy", messages=USER, stream=True)
    next(iter(stream))
    (call,) = session.close()
    with pytest.raises(openai.APIError, match="has ended"):
        list(stream)
    assert call.status == CallStatus.ABANDONED


def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error(serve: Any) -> None:
    served = serve("one two")
    session = served.open()

    async def fail(request: Any) -> Any:
        request.on_tokens(served.engine.tokenizer.encode("one two", add_special_tokens=False))
        raise RuntimeError("the engine broke")

    served.engine.generate = fail
    stream = session.model.sync_client.chat.completions.create(model="toy", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="the engine broke"):
        list(stream)
    assert (session.failure, session.close()[0].status) == (Outcome.INFRASTRUCTURE, CallStatus.ABANDONED)


def test_an_error_before_the_first_token_has_its_own_status(serve: Any) -> None:
    session = serve("hi", max_model_len=8).open()
    long: Any = [{"role": "user", "content": "long " * 50}]
    with pytest.raises(openai.BadRequestError) as caught:
        session.model.sync_client.chat.completions.create(model="toy", messages=long, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_several_choices_are_streamed_side_by_side(serve: Any) -> None:
    session = serve("one two").open()
    texts = ["", "", ""]
    for chunk in session.model.sync_client.chat.completions.create(model="toy", messages=USER, stream=True, n=3):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["one two"] * 3
    assert [call.status for call in session.close()] == [CallStatus.USED] * 3


def test_stop_strings_are_never_given_out(serve: Any, tokenizer: Any) -> None:
    def stopped(_: Any) -> Any:
        return generation(tokenizer.encode("before STOPafter", add_special_tokens=False), text="before ")

    session = serve(stopped).open()
    options: Any = {"model": "toy", "messages": USER, "stop": ["STOP"], "stream": True}
    chunks = session.model.sync_client.chat.completions.create(**options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "before "


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "add", "arguments": {}}',
        "\n",
        " ",
        "a",
        "é",
        "<",
        "🙂",
    ]
)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), tools=st.booleans(), opened=st.booleans(), thinks=st.booleans())
def test_streamed_text_adds_up_to_the_parsed_answer(
    tokenizer: Any, pieces: list[str], tools: bool, opened: bool, thinks: bool
) -> None:
    """Whatever the model says: the deltas are the answer, or the answer is parsed as the deltas were."""
    text = "".join(pieces)
    renderer, reasoning = Renderer(tokenizer), REASONING_FORMATS["qwen3"] if thinks else None
    given_out = {"reasoning": "", "content": ""}

    def give(delta: Any) -> None:
        given_out[delta.kind] += delta.text

    reader = AnswerReader(
        renderer.text_stream(np.array([5, 6, 7], np.int32), keep_special=True),
        give,
        choice=0,
        reasoning=reasoning,
        opened=opened,
        tools=TOOL_FORMATS["hermes"] if tools else None,
        stop=(),
    )
    for token in tokenizer.encode(text, add_special_tokens=False):
        reader.add([token])
    parsed = parse_text(
        text,
        tools=[TOOL] if tools else [],
        opened=opened,
        tool_format=TOOL_FORMATS["hermes"],
        reasoning_format=reasoning,
    )
    assert reader.agrees(parsed), (given_out, parsed)
    reader.finish(parsed)
    assert given_out == {"reasoning": parsed.reasoning, "content": parsed.content}


def test_events_over_http_are_well_formed(serve: Any) -> None:
    session = serve("hi there").open()
    headers = {"Authorization": f"Bearer {session.model.api_key}"}
    body = {"model": "toy", "messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    reply = httpx.post(f"{session.model.base_url}/chat/completions", headers=headers, json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, last, empty = reply.text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["usage"]["completion_tokens"] == len(session.close()[0].sampled_ids_S)
