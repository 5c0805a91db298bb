"""Short bytes that cost much: a request has a bounded number of items, which are counted before they are made, and no
answer is longer for what it refuses."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import toy_tokenizer
from test_gateway_malformed import send

from sharpen.gateway.body import CHUNK, MAX_ITEMS, decode, end_of_items, field_at
from sharpen.gateway.requests import SHOWN, ApiError, short_repr

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = '"messages": [{"role": "user", "content": "a"}]'
MANY = 400_000
KEYS = ",".join(f'"{number}":0' for number in range(MANY))


def many(item: str) -> str:
    """A list of as many items as make it a megabyte or more."""
    return "[" + ",".join([item] * MANY) + "]"


BODIES: list[tuple[str, str, str]] = [
    (CHAT, "messages", f'{{"messages": {many("{}")}}}'),
    (CHAT, "messages", f'{{"model": "toy", "messages": [{{"role": "user", "content": {many("[]")}}}]}}'),
    (CHAT, "messages", f'{{"messages": [{{"role": "user", "content": "a", {KEYS}}}], "model": "toy"}}'),
    (CHAT, "tools", f'{{{SAID}, "tools": {many("{}")}}}'),
    (CHAT, "stop", f'{{{SAID}, "stop": {many(json.dumps("a"))}, "n": 1}}'),
    (CHAT, "metadata", f'{{{SAID}, "metadata": {many("[[[]]]")}}}'),
    (CHAT, "metadata", f'{{{SAID}, "metadata": {many("1.5")}}}'),
    (CHAT, "logit_bias", f'{{{SAID}, "logit_bias": {{{KEYS}}}}}'),
    (CHAT, "response_format", f'{{{SAID}, "response_format": {{"type": "json_schema", "schema": {{{KEYS}}}}}}}'),
    (CHAT, "104096", f"{{{KEYS}}}"),
    (RESPONSES, "input", f'{{"input": {many("{}")}}}'),
    (RESPONSES, "tools", f'{{"input": "a", "tools": {many("{}")}}}'),
    (MESSAGES, "messages", f'{{"max_tokens": 9, "messages": [{{"role": "user", "content": {many("{}")}}}]}}'),
    ("/v1/completions", "prompt", f'{{"prompt": {many("7000")}}}'),
]


@pytest.mark.parametrize(("path", "field", "body"), BODIES, ids=[f"{path}-{field}" for path, field, _ in BODIES])
def test_too_many_items_cost_no_more_than_the_body(serve: Any, path: str, field: str, body: str) -> None:
    """Red when `decode` makes them first: 9 to 30 times the body, and nobody else is answered meanwhile."""
    served = serve("hi")
    session, content = served.open(), body.encode()
    tracemalloc.start()
    try:
        status, answer = send(served, session, content, path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(content) + 40 * CHUNK
    assert status == 413
    error = json.loads(answer)["error"]
    assert f"{MAX_ITEMS + 4096:,} items at most" in error["message"]
    assert f"'{field}'" in error["message"]
    assert error.get("param", field) == field
    assert session.failure is None
    assert session.close() == ()


def test_arguments_of_many_items_are_left_as_text(serve: Any) -> None:
    """JSON within the JSON, which some templates are given parsed. Red when `render` reads all of it."""
    served = serve("hi", tokenizer=toy_tokenizer(reparse=True))
    call = {"function": {"name": "add", "arguments": many("{}")}}
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}
    content = json.dumps(body).encode()
    tracemalloc.start()
    try:
        status, answer = send(served, served.open(), content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (status, json.loads(answer)["error"]["code"]) == (400, "context_length_exceeded")
    assert peak < 12 * len(content) + 40 * CHUNK


def test_the_bound_is_exact() -> None:
    assert decode(json.dumps([7] * 10).encode(), 10) == [7] * 10
    with pytest.raises(ApiError, match="10 items at most"):
        decode(json.dumps([7] * 11).encode(), 10)
    assert decode(b"[{}, [], {}]", 6) == [{}, [], {}]


def num_items(value: Any) -> int:
    """Members of objects and lists, and empty ones."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(inner)) + sum(map(num_items, inner))


def places(body: Any) -> Iterator[tuple[str, int]]:
    """The fields of an object, each with the number of items up to its end."""
    total = 0
    for name, value in body.items():
        total += 1 + num_items(value)
        yield name, total


TEXTS = st.text(st.sampled_from('a"\\,[]{}:é\U0001f642\n'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.booleans())
def test_items_are_counted_as_the_decoded_body_has_them(body: dict[str, Any], escaped: bool) -> None:
    """Whatever stands in its strings; and the item that is one too many is in the field that has it."""
    content, total = json.dumps(body, ensure_ascii=escaped).encode(), num_items(body)
    assert end_of_items(content, total) is None
    for most in range(total):
        place = end_of_items(content, most)
        assert place is not None
        assert field_at(content, place) == next((name for name, upto in places(body) if upto > most), None)


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("text", ["\\", '"', '\\"', '\\\\",[{'])
def test_strings_that_reach_from_one_piece_into_the_next(text: str, shift: int) -> None:
    """Red when a piece of the bytes may end within an escape."""
    body = {"a" * shift: text * (CHUNK // len(text) + 9), "b": [1, 2, 3]}
    content = json.dumps(body).encode()
    assert end_of_items(content, 5) is None
    place = end_of_items(content, 4)
    assert place is not None
    assert (field_at(content, place), content[place:]) == ("b", b", 3]}")


@given(VALUES)
def test_values_are_shown_as_python_shows_them(value: Any) -> None:
    whole = ascii(value)
    assert short_repr(value) == (whole if len(whole) <= SHOWN else f"{whole[:SHOWN]}...")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a"}], "x" * 1_000_000: 1},
        {"messages": [{"role": "é" * 1_000_000, "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}], "stream_options": {"x" * 1_000_000: 1}, "stream": True},
        {"messages": [{"role": "user", "content": "a"}], "metadata": {"x" * 1_000_000: "\ud800"}},
        {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"x" * 1_000_000: 1}},
        {"messages": [{"role": "user", "content": [{"type": "x" * 1_000_000}]}]},
        {"messages": [{"role": "tool", "content": "a", "tool_calls": [{"x" * 1_000_000: 1}]}]},
    ],
)
def test_what_is_refused_is_not_sent_back_whole(serve: Any, body: Any) -> None:
    """Red when the error names a field of a megabyte in full, or shows a whole value."""
    served = serve("hi")
    status, answer = send(served, served.open(), json.dumps(body).encode())
    assert status == 400
    assert len(answer) < 10_000
