"""The door: each dialect's requests are checked by a schema, which is also what the server publishes of them."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from malformed import BODIES
from openai.types.chat import ChatCompletionMessage
from test_gateway_malformed import send

from sharpen.errors import ConfigError
from sharpen.gateway.door import anthropic_place, openai_place
from sharpen.gateway.protocols import chat
from sharpen.gateway.protocols.protocol import Context
from sharpen.gateway.requests import ApiError
from sharpen.serve.openapi import CALLS, document
from sharpen.types import Sampling

CHAT, RESPONSES, COMPLETIONS, MESSAGES, COUNT = (
    *("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"),
)
SAID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    RESPONSES: {"input": "hello"},
    COMPLETIONS: {"prompt": "hello"},
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
    COUNT: {"messages": [{"role": "user", "content": "hello"}]},
}
BIG = 10**400
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((path, {"model": {}}, "model") for path in SAID),
    *((path, {"stream": "yes"}, "stream") for path in SAID),
    *((path, {"temperature": BIG}, "temperature") for path in SAID),
    *((path, {"temperature": [1]}, "temperature") for path in SAID),
    *((path, {"top_p": "much"}, "top_p") for path in SAID),
    *((path, {"tools": {"a": 1}}, "tools") for path in (CHAT, RESPONSES, MESSAGES, COUNT)),
    *((path, {"tools": [3]}, "tools{0}") for path in (CHAT, RESPONSES, MESSAGES, COUNT)),
    *((path, {"tool_choice": [[]]}, "tool_choice") for path in (CHAT, RESPONSES, MESSAGES, COUNT)),
    *((path, {"messages": "hello"}, "messages") for path in (CHAT, MESSAGES, COUNT)),
    *((path, {"messages": [["hello"]]}, "messages{0}") for path in (CHAT, MESSAGES, COUNT)),
    *((path, {"messages": [{"role": {}, "content": "x"}]}, "messages{0}.role") for path in (CHAT, MESSAGES, COUNT)),
    *(
        (path, {"messages": [{"role": "user", "content": [{"type": {}}]}]}, "messages{0}.content{0}.type")
        for path in (CHAT, MESSAGES, COUNT)
    ),
    (CHAT, {"seed": BIG}, "seed"),
    (CHAT, {"n": True}, "n"),
    (CHAT, {"n": 1.0}, "n"),
    (CHAT, {"max_tokens": 2**31}, "max_tokens"),
    (CHAT, {"stop": [{}]}, "stop[0]"),
    (CHAT, {"stop": ["x", ""]}, "stop[1]"),
    (CHAT, {"logit_bias": {"5": -100}}, "logit_bias"),
    (CHAT, {"modalities": ["audio"]}, "modalities[0]"),
    (CHAT, {"stream_options": []}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"a": 1}}, "stream_options"),
    (CHAT, {"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    (CHAT, {"reasoning_effort": "1"}, "reasoning_effort"),
    (CHAT, {"response_format": {"type": []}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": 1}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": {}}}]}, "tools[0].function.name"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": {}}}}, "tool_choice.function.name"),
    (
        CHAT,
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": 5}}},
        "tool_choice.allowed_tools.tools",
    ),
    (CHAT, {"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (COMPLETIONS, {"prompt": {}}, "prompt"),
    (COMPLETIONS, {"prompt": [[1, -1]]}, "prompt[0][1]"),
    (COMPLETIONS, {"logprobs": 6}, "logprobs"),
    (COMPLETIONS, {"messages": []}, "messages"),
    (RESPONSES, {"input": 5}, "input"),
    (RESPONSES, {"input": ["x"]}, "input[0]"),
    (RESPONSES, {"input": [{"type": {}}]}, "input[0].type"),
    (RESPONSES, {"input": [{"type": "web_search_call"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": [], "content": "x"}]}, "input[0].role"),
    (RESPONSES, {"input": [{"role": "assistant", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input[0].arguments"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": []}]}, "input[0].id"),
    (RESPONSES, {"previous_response_id": {}}, "previous_response_id"),
    (RESPONSES, {"instructions": []}, "instructions"),
    (RESPONSES, {"text": {"format": []}}, "text.format"),
    (RESPONSES, {"reasoning": {"effort": {}}}, "reasoning.effort"),
    (RESPONSES, {"include": [1]}, "include[0]"),
    (RESPONSES, {"tools": [{"type": "function", "name": {}}]}, "tools[0].name"),
    (RESPONSES, {"tool_choice": {"type": "function"}}, "tool_choice.name"),
    (RESPONSES, {"background": True}, "background"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"system": [1]}, "system.0"),
    (MESSAGES, {"thinking": []}, "thinking"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (MESSAGES, {"mcp_servers": [{}]}, "mcp_servers"),
    (MESSAGES, {"tools": [{"name": {}}]}, "tools.0.name"),
    (MESSAGES, {"tools": [{"name": "a", "input_schema": {}, "strict": 1}]}, "tools.0.strict"),
    (MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (
        MESSAGES,
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": 1, "name": "b", "input": {}}]}]},
        "messages.0.content.0.id",
    ),
]
"""By path: what is wrong, and where."""


@pytest.mark.parametrize(("path", "wrong", "place"), WRONG, ids=[f"{path} {place}" for path, _, place in WRONG])
def test_a_wrong_value_is_a_400_that_names_its_place_and_the_value(
    serve: Any, path: str, wrong: dict[str, Any], place: str
) -> None:
    """Most were a 500 once, one of them for all calls in flight. Red when `Door.check` lets everything pass."""
    served = serve("hi")
    session = served.open()
    status, answer = send(served, session, json.dumps({**SAID[path], **wrong}).encode(), path)
    error = json.loads(answer)["error"]
    named = place.format(*(f".{n}" if path in (MESSAGES, COUNT) else f"[{n}]" for n in range(2)))
    assert (status, error["type"]) == (400, "invalid_request_error"), answer
    assert named in error["message"]
    assert path in (MESSAGES, COUNT) or error["param"] == named
    assert session.failure is None
    assert session.close() == ()


NULLS = {"functions": None, "function_call": None, "audio": None, "prediction": None, "web_search_options": None}
"""What clients send that write all their fields. No path knows these."""
TAKEN: list[tuple[str, dict[str, Any]]] = [
    *((path, NULLS) for path in SAID),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": None}}),
    (CHAT, {"messages": [{"role": "user", "content": "x", "weight": None, "audio": None}]}),
    (CHAT, {"response_format": {"type": "json_schema", "schema": {"type": "object"}}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": None, "schema": {"type": "object"}}}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}),
    (RESPONSES, {"tools": [{"type": "function", "name": "a", "parameters": []}]}),
    (RESPONSES, {"text": {"format": {}}}),
]


@pytest.mark.parametrize(
    ("path", "more"), TAKEN, ids=[f"{path} {'nulls' if more is NULLS else json.dumps(more)}" for path, more in TAKEN]
)
def test_what_clients_send_without_a_meaning_is_taken(serve: Any, path: str, more: dict[str, Any]) -> None:
    """Nulls for unknown fields, PHP's empty objects, a format as the other dialect has it. Red for each when the door
    held all to the schema."""
    served = serve("{}")
    session = served.open()
    status, answer = send(served, session, json.dumps({**SAID[path], **more}).encode(), path)
    assert status == 200, answer
    assert len(session.close()) == (path != COUNT)


@pytest.mark.parametrize("path", [path for path in SAID if path != COUNT])
def test_an_unknown_field_is_told_beside_nulls(serve: Any, path: str) -> None:
    served = serve("hi")
    body = {**SAID[path], **NULLS, "no_such": 0}
    status, answer = send(served, served.open(), json.dumps(body).encode(), path)
    assert (status, "no_such" in json.loads(answer)["error"]["message"]) == (400, True), answer


def test_a_recorded_message_may_have_nulls_but_no_unknown_fields() -> None:
    """As rows of a table have them, in which other messages have the field."""
    chat.check_recorded({"role": "user", "content": "hi", "tool_calls": None, "weight": None}, 0)
    with pytest.raises(ApiError, match="weight"):
        chat.check_recorded({"role": "user", "content": "hi", "weight": 1}, 0)


def test_messages_of_the_sdk_are_counted(serve: Any) -> None:
    """They are no dicts. Red when the door sees them as they came."""
    model = serve("hi").open().model
    said = [{"role": "user", "content": "hello"}, ChatCompletionMessage(role="assistant", content="hi")]
    counted = asyncio.run(model.count_tokens(said))
    assert counted == asyncio.run(model.count_tokens([said[0], {"role": "assistant", "content": "hi"}])) > 0
    for wrong in (5, "hello", None):
        with pytest.raises(ConfigError, match="must be an object"):
            asyncio.run(model.count_tokens([wrong]))


def test_messages_say_what_came_and_what_is_right() -> None:
    """Of a choice of types the one that fits best is told; a million wrong items are one error."""
    for body, told in (
        ({"messages": [5] * 100_000}, "'messages[0]' is 5; it must be an object."),
        ({"messages": []}, "'messages' is []; it must have at least 1 item."),
        ({"messages": [{"role": "user", "content": 5}]}, "content' is 5; it must be a string or be a list."),
        ({"messages": [{"role": "owner"}]}, "role' is 'owner'; it must be one of 'system', 'developer', 'user'"),
        ({**SAID[CHAT], "n": 0}, "'n' is 0; it must be greater than or equal to 1."),
        ({**SAID[CHAT], "min_q": 0}, "Unrecognized or unsupported request argument: 'min_q'."),
        ({**SAID[CHAT], "min_p": 2}, "'min_p' is 2; it must be less than or equal to 1."),
        ({**SAID[CHAT], "stop": 5}, "'stop' is 5; it must be a string or be a list."),
        ({}, "messages: Field required"),
        ([], "The request body must be a JSON object."),
    ):
        with pytest.raises(ApiError) as caught:
            chat.DOOR.check(body)
        assert told in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        {**SAID[CHAT], **{f"field {number}": 1 for number in range(20_000)}},
        {**SAID[CHAT], **{f"field {number}": None for number in range(20_000)}, "other": 1},
        {**SAID[CHAT], "stream": True, "stream_options": {f"field {number}": 1 for number in range(20_000)}},
        {"messages": [5] * 20_000},
        {"messages": [{"role": "user", "content": [5] * 20_000}]},
        {**SAID[CHAT], "stop": [5] * 20_000},
    ],
    ids=["fields", "fields beside nulls", "fields below", "items", "items below", "items of a choice"],
)
def test_many_problems_cost_no_more_than_one(body: Any) -> None:
    """Red when fields are told one by one, or a list is read to its end: 64 MB of them took minutes, and gigabytes."""
    context = Context(model_name="toy", defaults=Sampling())
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            chat.parse_request(body, context)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_nothing_is_converted() -> None:
    for wrong in ("1", 1.0, True):
        with pytest.raises(ApiError, match="'n' is "):
            chat.DOOR.check({**SAID[CHAT], "n": wrong})


@pytest.mark.parametrize("path", CALLS)
def test_what_is_published_is_what_is_checked(path: str) -> None:
    """Each field of a valid request is described, and others are not taken."""
    described = document("1")
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = described["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert set(BODIES[path]) <= set(schema["properties"])
    if path != COUNT:
        assert schema["additionalProperties"] is False
    references = json.dumps(described).split('"$ref": "#/components/schemas/')[1:]
    assert {reference.partition('"')[0] for reference in references} <= set(described["components"]["schemas"])


def test_places_are_written_as_the_vendors_do() -> None:
    place = ("messages", 0, "content", 1, "text")
    assert openai_place(place) == "messages[0].content[1].text"
    assert anthropic_place(place) == "messages.0.content.1.text"
