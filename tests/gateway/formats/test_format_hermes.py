"""Hermes calls and thinking tags, by themselves: what is a call, what is reasoning, what stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.gateway.formats import hermes
from sharpen.gateway.formats.format import DEEPSEEK_R1, QWEN3, ParsedCalls


def parse_hermes(text: str) -> ParsedCalls:
    return hermes.parse(text, ())


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_no_markup_is_content() -> None:
    assert parse_hermes(" plain\n") == (" plain\n", (), False)


def test_one_newline_before_a_call_is_the_templates() -> None:
    content, calls, malformed = parse_hermes(f"so\n\n{CALL}\n{CALL}")
    assert (content, len(calls), malformed) == ("so\n", 2, False)


def test_text_after_a_call_is_kept() -> None:
    assert parse_hermes(f"a\n{CALL} b")[0] == "a b"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "</tool_call>",
        f"{CALL}<tool_call>",
        f"{CALL}</tool_call>",
        f"{CALL}<tool_call>no</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}} x</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)
def test_malformed_markup_stays_text(text: str) -> None:
    assert parse_hermes(text) == (text, (), True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), JSON), st.sampled_from([None, 1, "\t"]), st.booleans())
def test_arguments_are_the_substring_that_was_sampled(arguments: dict[str, object], indent: int, ascii: bool) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii)
    content, calls, malformed = parse_hermes(f'<tool_call>{{ "arguments" :{written} , "name":"f"}}</tool_call>')
    if "tool_call>" not in written:
        assert (content, malformed) == ("", False)
        assert (calls[0].name, calls[0].arguments) == ("f", written)


@given(st.text(st.sampled_from('<>/tool_ca{}":,ne')))
def test_any_text_parses(text: str) -> None:
    content, calls, malformed = parse_hermes(text)
    assert calls or content == text
    assert not (calls and malformed)


@pytest.mark.parametrize(
    ("text", "opened", "r1", "qwen3"),
    [
        ("plain", False, ("", "plain"), ("", "plain")),
        ("<think>\nso\n</think>\n\nyes", False, ("so", "yes"), ("so", "yes")),
        ("so\n</think>\n\nyes", True, ("so", "yes"), ("so", "yes")),
        ("so</think>yes", False, ("so", "yes"), ("", "so</think>yes")),
        ("<think>cut", False, ("cut", ""), ("cut", "")),
        ("cut", True, ("cut", ""), ("cut", "")),
    ],
)
def test_reasoning(text: str, opened: bool, r1: tuple[str, str], qwen3: tuple[str, str]) -> None:
    assert DEEPSEEK_R1.parse(text, opened) == r1
    assert QWEN3.parse(text, opened) == qwen3
