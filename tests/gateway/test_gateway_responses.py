"""OpenAI's Responses through its own SDK: whole and streamed, with tools, reasoning and stored answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from sharpen.types import CallStatus, Outcome

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
THINKS = f"<think>\nlet me see\n</think>\n\nadding\n{CALL}"


def ask(session: Any, **options: Any) -> Any:
    return session.model.sync_client.responses.create(**{"model": "toy", "input": "hello", **options})


def scripted(*answers: str) -> Any:
    left: Iterator[str] = iter(answers)
    return lambda request: next(left)


def continues(one: Any, two: Any) -> bool:
    """Whether the second call begins with all of the first one's ids."""
    ids = np.concatenate([one.prompt_ids_P, one.sampled_ids_S])
    return two.parent == one.index and np.array_equal(two.prompt_ids_P[: len(ids)], ids)


def test_both_clients(serve: Any) -> None:
    session = serve("hi there").open()

    async def workflow() -> Any:
        return await session.model.client.responses.create(model="toy", input="hello", instructions="be brief")

    for response in (ask(session), asyncio.run(workflow())):
        assert (response.output_text, response.status, response.object) == ("hi there", "completed", "response")
    one, two = session.close()
    assert one.messages == ({"role": "user", "content": "hello"},)
    assert two.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"})
    assert [call.status for call in (one, two)] == [CallStatus.USED] * 2
    assert response.usage.input_tokens == len(two.prompt_ids_P)
    assert response.usage.output_tokens == len(two.sampled_ids_S)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_conversation_of_items_continues_the_sampled_ids(serve: Any, sealed: bool) -> None:
    """Reasoning, text and call come back as items of their own. With `sealed`, as Codex does: content left out."""
    session = serve(scripted(THINKS, "three")).open()
    options: Any = {"tools": [TOOL], "store": False}
    if sealed:
        options["include"] = ["reasoning.encrypted_content"]
    first = ask(session, **options)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = (item.model_dump(exclude_none=True) for item in first.output)
    assert (call["name"], call["arguments"]) == ("add", '{"a":  1}')
    if sealed:
        del reasoning["content"]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *({**item, "id": f"changed_{place}"} for place, item in enumerate((reasoning, message, call))),
        {"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "3"}]},
    ]
    second = ask(session, **{**options, "input": items})
    assert second.output_text == "three"
    one, two = session.close()
    assert continues(one, two)
    assert [message["role"] for message in two.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("over_http", [False, True])
def test_the_input_of_a_stored_answer_is_read_page_by_page(serve: Any, over_http: bool) -> None:
    session = serve("hi").open()
    with contextlib.ExitStack() as stack:
        client = session.model.sync_client
        if over_http:
            client = openai.OpenAI(base_url=session.model.base_url, api_key=session.model.api_key, max_retries=0)
            stack.enter_context(client)
        said = [{"role": "user", "content": f"text {place}"} for place in range(5)]
        one = client.responses.create(model="toy", input=said)
        pages = client.responses.input_items.list(one.id, limit=2, order="asc")
        assert pages.has_more
        items = list(pages)  # the SDK asks for the further pages
        assert [item.content[0].text for item in items] == [f"text {place}" for place in range(5)]
        assert len({item.id for item in items}) == 5
        newest = client.responses.input_items.list(one.id).data
        assert [item.id for item in newest] == [item.id for item in reversed(items)]
        two = client.responses.create(model="toy", input="and?", previous_response_id=one.id)
        assert [item.content[0].text for item in client.responses.input_items.list(two.id)] == ["and?"]
        wrong: list[tuple[dict[str, Any], str]] = [({"limit": 0}, "limit"), ({"order": "up"}, "order")]
        for options, name in [*wrong, ({"after": "none"}, "after"), ({"extra_query": {"x": "1"}}, "x")]:
            with pytest.raises(openai.BadRequestError) as error:
                client.responses.input_items.list(one.id, **options)
            assert error.value.param == name
    assert len(session.close()) == 2


def test_two_answers_to_the_same_stored_one_are_branches_of_its_call(serve: Any) -> None:
    session = serve(scripted("root", "left", "right", "leaf")).open()
    root = ask(session)
    left = ask(session, input="go left", previous_response_id=root.id)
    right = ask(session, input="go right", previous_response_id=root.id)
    assert ask(session, input="on", previous_response_id=left.id).output_text == "leaf"
    assert (left.output_text, right.output_text) == ("left", "right")
    calls = session.close()
    assert [call.parent for call in calls] == [None, 0, 0, 1]
    assert all(continues(calls[0], call) for call in calls[1:3])
    assert continues(calls[1], calls[3])


def test_a_stored_answer_is_continued_by_its_id(serve: Any) -> None:
    session = serve(scripted(THINKS, "three", "four")).open()
    first = ask(session, tools=[TOOL], instructions="be brief")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "3"}
    second = ask(
        session, tools=[TOOL], instructions="be brief", previous_response_id=first.id, input=[output], store=False
    )
    assert session.model.sync_client.responses.retrieve(first.id).output_text == "adding"
    with pytest.raises(openai.BadRequestError, match="not found"):
        ask(session, previous_response_id=second.id)
    referenced = [{"type": "item_reference", "id": item.id} for item in first.output]
    ask(
        session,
        tools=[TOOL],
        instructions="be brief",
        input=[{"role": "user", "content": "hello"}, *referenced, output],
    )
    session.model.sync_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        session.model.sync_client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        session.model.sync_client.responses.input_items.list(first.id)
    one, two, three = session.close()
    assert continues(one, two)
    assert continues(one, three)


def test_a_stream_builds_what_the_whole_answer_is(serve: Any) -> None:
    served = serve(THINKS)
    session = served.open()
    options: Any = {"model": "toy", "input": "hello", "tools": [TOOL], "reasoning": {"summary": "auto"}}
    with session.model.sync_client.responses.stream(**options) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    whole = ask(session, **options)

    def output(response: Any) -> list[Any]:
        items = [item.model_dump(exclude={"id", "call_id", "parsed_arguments", "parsed"}) for item in response.output]
        for item in items:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return items

    assert output(streamed) == output(whole)
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "adding"
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "let me see"
    assert "".join(e.delta for e in events if e.type == "response.reasoning_summary_text.delta") == "let me see"
    assert [call.status for call in session.close()] == [CallStatus.USED] * 2


def test_an_empty_answer_is_a_message_without_text(serve: Any) -> None:
    session = serve("").open()
    assert [item.type for item in ask(session).output] == ["message"]
    with session.model.sync_client.responses.stream(model="toy", input="hello") as stream:
        assert [item.type for item in stream.get_final_response().output] == ["message"]


def test_a_custom_tool_is_a_function_with_one_string(serve: Any) -> None:
    said = '<tool_call>\n{"name": "patch", "arguments": {"input":"*** a"}}\n</tool_call>'
    session = serve(scripted(said, "done")).open()
    tools: Any = [{"type": "custom", "name": "patch"}, {"type": "web_search"}, {"type": "namespace", "name": "n"}]
    (call,) = ask(session, tools=tools).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "*** a")
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    items = [{"role": "user", "content": "hello"}, call.model_dump(), output]
    ask(session, tools=tools, input=items)
    one, two = session.close()
    assert [tool["function"]["name"] for tool in one.tools] == ["patch"]
    assert continues(one, two)


def test_what_codex_sends(serve: Any) -> None:
    """Facts of its requests: developer messages first, ids of its own, fields of caches and clients."""
    session = serve("done").open()
    body = {
        "model": "agent",
        "stream": True,
        "input": [
            {
                "type": "message",
                "id": "msg_1",
                "role": "developer",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "task"}]},
        ],
        "tools": [TOOL, {"type": "web_search", "external_web_access": True}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
    }
    headers = {"authorization": f"Bearer {session.model.api_key}", "accept": "text/event-stream"}
    reply = httpx.post(f"{session.model.base_url}/responses", headers=headers, json=body)
    kinds = [line.removeprefix("event: ") for line in reply.text.splitlines() if line.startswith("event: ")]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    (call,) = session.close()
    assert (call.status, call.messages[0]) == (CallStatus.USED, {"role": "developer", "content": "ab"})


def test_a_cut_answer_is_incomplete(serve: Any) -> None:
    session = serve("one two three four").open()
    response = ask(session, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_logprobs(serve: Any) -> None:
    response = ask(serve("yes").open(), include=["message.output_text.logprobs"])
    assert response.output[0].content[0].logprobs[0].logprob == pytest.approx(-0.5)


def test_an_overflow_has_the_code_from_which_agents_compact(serve: Any) -> None:
    """Codex reads it in a stream's event alone, where the vendor has it."""
    session = serve("hi", max_model_len=16).open()
    with pytest.raises(openai.BadRequestError, match="exceeds the context window") as caught:
        ask(session, input="long " * 50)
    assert caught.value.code == "context_length_exceeded"
    events = list(ask(session, input="long " * 50, stream=True))
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.error.code == "context_length_exceeded"
    assert "exceeds the context window" in events[-1].response.error.message
    assert session.failure == Outcome.CONTEXT_OVERFLOW
    assert session.close() == ()


def test_an_engine_that_fails_in_the_middle_fails_the_response(serve: Any) -> None:
    served = serve("one two")
    session = served.open()

    async def fail(request: Any) -> Any:
        request.on_tokens(served.engine.tokenizer.encode("one two", add_special_tokens=False))
        raise RuntimeError("the engine broke")

    served.engine.generate = fail
    last = list(ask(session, stream=True))[-1]
    assert (last.type, session.failure) == ("response.failed", Outcome.INFRASTRUCTURE)
    assert "the engine broke" in last.response.error.message


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "image_url is an image"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
    ({"input": [{"type": "function_call", "name": "a", "call_id": "b"}]}, "arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "stored"),
    ({"instructions": 3}, "instructions"),
    ({"previous_response_id": "resp_none"}, "resp_none"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tool_choice": {"type": "function", "name": "none such"}}, "none such"),
    ({"tool_choice": "required"}, "required"),
    ({"include": "x"}, "include"),
    ({"reasoning": "x"}, "reasoning"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_a_bad_request_is_refused_in_the_vendors_shape(serve: Any, changed: dict[str, Any], said: str) -> None:
    session = serve("hi").open()
    headers = {"authorization": f"Bearer {session.model.api_key}"}
    body = {"model": "toy", "input": "hello", **changed}
    reply = httpx.post(f"{session.model.base_url}/responses", headers=headers, json=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert said in reply.json()["error"]["message"]
    assert session.close() == ()


def test_a_conversation_may_change_its_protocol(serve: Any) -> None:
    """Begun in Responses, continued in Messages and in chat: the same ids go on, since the text is the same."""
    session = serve(scripted("one", "two", "three")).open()
    ask(session)
    said: Any = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one"}]
    said.append({"role": "user", "content": "more"})
    session.model.sync_anthropic_client.messages.create(model="toy", max_tokens=50, messages=said)
    said += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "more"}]
    session.model.sync_client.chat.completions.create(model="toy", messages=said)
    one, two, three = session.close()
    assert continues(one, two)
    assert continues(two, three)
