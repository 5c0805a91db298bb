"""Anthropic's Messages through its own SDK: whole and streamed, with tools and thinking, and token-exact all along."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import numpy as np
import pytest

from sharpen.types import CallStatus, Outcome

USER: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
ADAPTIVE: Any = {"type": "adaptive"}


def ask(session: Any, **options: Any) -> Any:
    given = {"model": "toy", "max_tokens": 100, "messages": USER, **options}
    return session.model.sync_anthropic_client.messages.create(**given)


def scripted(*answers: str) -> Any:
    left: Iterator[str] = iter(answers)
    return lambda request: next(left)


def test_both_clients(serve: Any) -> None:
    session = serve("hi there").open()

    async def workflow() -> Any:
        return await session.model.anthropic_client.messages.create(model="toy", max_tokens=100, messages=USER)

    for message in (ask(session), asyncio.run(workflow())):
        assert [(block.type, block.text) for block in message.content] == [("text", "hi there")]
        assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    one, two = session.close()
    assert (one.status, two.status) == (CallStatus.USED, CallStatus.USED)
    assert one.messages == tuple(USER)
    assert message.usage.input_tokens == len(two.prompt_ids_P)
    assert message.usage.output_tokens == len(two.sampled_ids_S)


def test_a_conversation_with_tools_continues_the_sampled_ids(serve: Any) -> None:
    """Red when arguments are written anew: the sampled ones have two spaces after the colon."""
    session = serve(scripted(f"<think>\nlet me see\n</think>\n\nadding\n{CALL}", "three")).open()
    first = ask(session, tools=[TOOL], thinking=ADAPTIVE)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"
    use = first.content[-1]
    assert (use.name, use.input) == ("add", {"a": 1})
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "3"}],
        "is_error": False,
    }
    history = [*USER, {"role": "assistant", "content": [block.model_dump() for block in first.content]}]
    ask(session, tools=[TOOL], thinking=ADAPTIVE, messages=[*history, {"role": "user", "content": [result]}])
    one, two = session.close()
    assert two.parent == one.index
    continued = np.concatenate([one.prompt_ids_P, one.sampled_ids_S])
    assert np.array_equal(two.prompt_ids_P[: len(continued)], continued)
    assert two.messages[-1] == {"role": "tool", "tool_call_id": use.id, "content": "3"}


@pytest.mark.parametrize(
    "said", [{"content": "no such file"}, {"content": [{"type": "text", "text": "no such file"}]}, {}]
)
def test_the_model_is_told_that_a_tool_failed(serve: Any, said: dict[str, Any]) -> None:
    session = serve(scripted(CALL, "so")).open()
    first = ask(session, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "is_error": True, **said}
    history = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    ask(session, tools=[TOOL], messages=history)
    assert session.close()[-1].messages[-1]["content"] == ("Error: no such file" if said else "Error: ")


def test_a_stream_has_the_events_of_the_sdk(serve: Any) -> None:
    session = serve(f"<think>\nlet me see\n</think>\n\nadding\n{CALL}").open()
    options: Any = {"model": "toy", "max_tokens": 100, "messages": USER, "tools": [TOOL], "thinking": ADAPTIVE}
    with session.model.sync_anthropic_client.messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    thinking, text, use = message.content
    assert (thinking.thinking, text.text, use.input) == ("let me see", "adding", {"a": 1})
    assert message.stop_reason == "tool_use"
    (call,) = session.close()
    assert (call.status, message.usage.output_tokens) == (CallStatus.USED, len(call.sampled_ids_S))


def test_thinking_is_given_out_where_it_is_asked_for(serve: Any) -> None:
    session = serve("<think>\nhm\n</think>\n\nyes").open()
    assert [block.type for block in ask(session).content] == ["text"]
    with session.model.sync_anthropic_client.messages.stream(model="toy", max_tokens=100, messages=USER) as stream:
        assert [block.type for block in stream.get_final_message().content] == ["text"]


def test_what_claude_code_sends(serve: Any) -> None:
    """Facts of its requests: a beta header, blocks with `cache_control` that moves, a system message in the middle."""
    served = serve(scripted("one", "two"))
    session = served.open()
    url = session.model.base_url.removesuffix("/v1")
    assert httpx.head(url + "/").status_code == 200
    headers = {"x-api-key": session.model.api_key, "anthropic-beta": "a-2025,b-2026", "anthropic-version": "2023-06-01"}
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "claude-sonnet",
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "here", **cached}]},
            {"role": "system", "content": "a reminder"},
        ],
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": ADAPTIVE,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "some_beta_field": 1,
        "stream": False,
    }
    first = httpx.post(f"{url}/v1/messages?beta=true", headers=headers, json=body).json()
    assert first["content"] == [{"type": "text", "text": "one"}]
    body["messages"] = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "here"}]},
        {"role": "system", "content": "a reminder"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [{"type": "text", "text": "more", **cached}]},
    ]
    assert httpx.post(f"{url}/v1/messages?beta=true", headers=headers, json=body).status_code == 200
    one, two = session.close()
    assert two.parent == one.index
    assert [tool["function"]["name"] for tool in one.tools] == ["add"]


def test_counting_tokens_is_no_call(serve: Any) -> None:
    session = serve("hi").open()
    counted = session.model.sync_anthropic_client.messages.count_tokens(model="toy", messages=USER, system="be brief")
    ask(session, system="be brief")
    (call,) = session.close()
    assert counted.input_tokens == len(call.prompt_ids_P)


def test_an_answer_that_was_begun_is_continued(serve: Any) -> None:
    served = serve("lo")
    session = served.open()
    ask(session, messages=[*USER, {"role": "assistant", "content": "hel"}])
    assert served.engine.tokenizer.decode(served.engine.requests[0].prompt_ids).endswith("assistant\nhel")


def test_a_stop_sequence_is_named(serve: Any, tokenizer: Any) -> None:
    from scripted import generation

    said = generation(tokenizer.encode("before STOP", add_special_tokens=False), text="before ")
    message = ask(serve(lambda request: said).open(), stop_sequences=["STOP", "END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text == "before "


def test_a_cut_answer_says_so(serve: Any) -> None:
    assert ask(serve("one two three four").open(), max_tokens=3).stop_reason == "max_tokens"


def test_an_overflow_has_the_words_from_which_agents_compact(serve: Any) -> None:
    session = serve("hi", max_model_len=16).open()
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 16 maximum") as caught:
        ask(session, messages=[{"role": "user", "content": "long " * 50}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
    assert session.failure == Outcome.CONTEXT_OVERFLOW


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source.type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "input"),
    ({"system": 3}, "system"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "loud"}}, "thinking"),
    ({"tools": [{"name": "a"}]}, "input_schema"),
    ({"tools": [{"input_schema": {}}]}, "name"),
    ({"tool_choice": {"type": "tool", "name": "none such"}}, "none such"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_a_bad_request_is_refused_in_the_vendors_shape(serve: Any, changed: dict[str, Any], said: str) -> None:
    session = serve("hi").open()
    body = {"model": "toy", "max_tokens": 10, "messages": USER, **changed}
    reply = httpx.post(f"{session.model.base_url}/messages", headers={"x-api-key": session.model.api_key}, json=body)
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert said in reply.json()["error"]["message"]
    assert session.close() == ()


def test_a_conversation_that_the_server_is_to_keep_is_refused_so_that_it_is_sent_whole(serve: Any) -> None:
    """Red while a thread was an unknown beta field without effect: the model saw the new message alone."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(
            serve("hi").open(),
            extra_body={"thread": {"type": "continue", "previous_message_id": "msg_1"}},
            extra_headers={"anthropic-beta": "message-threads-2026-08-12"},
        )
    details = caught.value.body["error"]["details"]  # type: ignore[index]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_a_bad_key_is_refused_in_the_vendors_shape(serve: Any) -> None:
    session = serve("hi").open()
    reply = httpx.post(f"{session.model.base_url}/messages", headers={"x-api-key": "no"}, json={})
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")


def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error(serve: Any) -> None:
    served = serve("one two")
    session = served.open()

    async def fail(request: Any) -> Any:
        request.on_tokens(served.engine.tokenizer.encode("one two", add_special_tokens=False))
        raise RuntimeError("the engine broke")

    served.engine.generate = fail
    options: Any = {"model": "toy", "max_tokens": 100, "messages": USER}
    with (
        pytest.raises(anthropic.APIError, match="the engine broke"),
        session.model.sync_anthropic_client.messages.stream(**options) as stream,
    ):
        list(stream)
    assert session.failure == Outcome.INFRASTRUCTURE


def test_models_are_listed_for_both_vendors(serve: Any) -> None:
    session = serve("hi").open()
    assert [model.id for model in session.model.sync_anthropic_client.models.list()] == ["toy"]
    assert [model.id for model in session.model.sync_client.models.list()] == ["toy"]
    assert session.model.sync_client.models.retrieve("toy").id == "toy"
    assert json.loads(httpx.get(session.model.base_url.removesuffix("/v1") + "/health").text) == {}
