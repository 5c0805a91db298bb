"""Requests that are almost right: valid ones in which one place holds anything at all.

In: hypothesis. Out: the bytes of a body. Values are put in as raw JSON, so that they may be what no encoder writes.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1},
        "b": {"type": ["string", "null"], "maxLength": 9},
        "c": {"anyOf": [{"$ref": "#/$defs/C"}, {"enum": ["x", 1]}]},
    },
    "required": ["a"],
    "$defs": {"C": {"type": "array", "items": {"$ref": "#/$defs/C"}, "minItems": 1}},
}
BASE: dict[str, Any] = {
    "model": "toy",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "2+2"}], "name": "bob"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "so",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4", "name": "add"},
        {"role": "assistant", "content": "4"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}}
    ],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "parallel_tool_calls": True,
    "stop": ["x", "yz"],
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "max_tokens": 7,
    "n": 2,
    "seed": 3,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "continue_final_message": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "return_token_ids": True,
    "frequency_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "metadata": {"a": "b"},
    "user": "u",
}
MESSAGES: dict[str, Any] = {
    "model": "toy",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "2+2"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": ""},
                {"type": "text", "text": "adding"},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "system", "content": "a reminder"},
        {"role": "assistant", "content": "4"},
    ],
    "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}, {"type": "bash_1", "name": "bash"}],
    "tool_choice": {"type": "tool", "name": "add"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x", "yz"],
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "stream": True,
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "high"},
}
RESPONSES: dict[str, Any] = {
    "model": "toy",
    "instructions": "be brief",
    "input": [
        {"role": "developer", "content": "short"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2+2"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "reasoning", "id": "s", "summary": [], "encrypted_content": "sharpen.c28="},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "adding"}]},
        {"type": "function_call", "id": "f", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "id": "g", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "ok"},
    ],
    "tools": [
        {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": False},
        {"type": "custom", "name": "patch"},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "add"},
    "reasoning": {"effort": "high", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "store": True,
    "stream": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_logprobs": 2,
    "max_output_tokens": 9,
    "metadata": {"a": "b"},
    "truncation": "auto",
}
COMPLETIONS: dict[str, Any] = {
    "model": "toy",
    "prompt": "2+2",
    "max_tokens": 9,
    "n": 2,
    "logprobs": 2,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 3,
    "user": "u",
}
COUNTED = {key: MESSAGES[key] for key in ("model", "messages", "system", "tools", "tool_choice", "thinking")}
BODIES = {
    "/v1/chat/completions": BASE,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/completions": COMPLETIONS,
    "/v1/messages/count_tokens": COUNTED,
}
"""A valid request for each path."""
RAW = (
    *("null", "true", "false", "0", "-1", "1", "0.5", "1e-320", "1e-30", "1e999", "-1e999", "NaN", "Infinity"),
    *("9223372036854775808", "1" + "0" * 400, "-" + "9" * 400, "9" * 5000, "2147483648", "4e18"),
    *('""', '"x"', '"required"', '"none"', '"assistant"', '"\\ud800"', '"a\\udc00b"', '"\\ud83d\\ude00"', '"\\u0000"'),
    *("[]", "{}", "[[]]", "[{}]", '{"a": {"b": []}}', '{"\\ud800": 1}', '["\\ud800"]', '[""]', "[1, null]"),
    *("[" * 63 + "]" * 63, "[" * 300 + "]" * 300, "[" * 50_000 + "]" * 50_000, '{"a":' * 200 + "1" + "}" * 200),
    *(json.dumps("[" * 300 + "]" * 300), json.dumps("[" * 50_000), json.dumps('{"a": "\\ud800"}'), '"[1e999, NaN]"'),
    *(
        '{"type": "function"}',
        '{"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": 5}}',
        '{"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": {}}}]}}',
        '{"type": "function", "function": {"name": {}}}',
        '[{"type": "text", "text": "\\ud800"}]',
    ),
    *('[{"type": {}, "text": 1}]', '{"role": "user", "content": "x"}', '[{"role": [], "content": {}}]', "{,}", "", "]"),
)
KEYS = (
    *("name", "id", "type", "role", "content", "tool_calls", "function", "arguments", "reasoning_content", "refusal"),
    *("provider_specific_fields", "index", "plain_text", "n", "max_completion_tokens", "presence_penalty", "messages"),
    *("tokenize", "conversations", "self", "raise_exception", "bos_token", "", "\u0000", "é"),
)
MARK = "@@here@@"


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values, and of new members of all objects."""
    found = [path]
    if isinstance(value, dict):
        found += [(*path, key) for key in KEYS if key not in value]
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        found += _places(member, (*path, key))
    return found


PLACES = {path: _places(body) for path, body in BODIES.items()}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
).map(json.dumps)
DROPPED = ("tool_choice", "stop", "n", "stream", "stream_options", "continue_final_message", "logprobs", "tools")
"""Optional fields that keep others from being looked at."""


@st.composite
def bodies(draw: st.DrawFn, path: str = "/v1/chat/completions") -> bytes:
    """The bytes of a request that is wrong in one or two places, or cut."""
    body: Any = copy.deepcopy(BODIES[path])
    for key in draw(st.sets(st.sampled_from(DROPPED), max_size=3)):
        body.pop(key, None)
    values = []
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from(PLACES[path]))
        if not place:
            continue
        target = body
        try:
            for step in place[:-1]:
                target = target[step]
            target[place[-1]] = MARK
        except (KeyError, TypeError, IndexError):  # what was dropped, or is a mark now
            continue
        values.append(draw(st.sampled_from(RAW) | JSON))
    text = json.dumps(body)
    for value in values:
        text = text.replace(json.dumps(MARK), value, 1)
    content = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=40) | st.just(content[: len(content) // 2]) | st.just(text.encode("utf-16")))
    return content
