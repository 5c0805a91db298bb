"""Parsers of sampled text into reasoning, tool calls and content.

In: the sampled text (end token removed), whether tools were offered, whether the prompt itself opened `<think>`. Out:
`ParsedText`. Text that does not parse stays in the content unchanged, so that the agent sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sharpen.gateway.body import is_text, refuse_constant

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
WHITESPACE = re.compile(r"[ \t\n\r]*")
TOOL_TAGS = ("<tool_call>", "</tool_call>")
TOOL_TAG = re.compile(r"</?tool_call>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function's name and its arguments: the sampled substring itself, a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """The parts of an assistant message. `tool_parse_error`: the text had tool-call markup that is not a valid call."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_parse_error: bool = False


ToolParser = Callable[[str], "tuple[str, tuple[ToolCall, ...], bool]"]
ReasoningParser = Callable[[str, bool], "tuple[str, str]"]


def parse_hermes(text: str) -> tuple[str, tuple[ToolCall, ...], bool]:
    """Return content, calls, and whether the markup was malformed (then the whole text is content, without calls).

    One newline before the first call belongs to the template and is not content.
    """
    if TOOL_TAG.search(text) is None:
        return text, (), False
    calls = []
    rest = []
    end = 0
    for match in TOOL_CALL.finditer(text):
        call = _parse_call(match.group(1))
        if call is None:
            return text, (), True
        calls.append(call)
        rest.append(text[end : match.start()])
        end = match.end()
    rest.append(text[end:])
    if not calls or any(TOOL_TAG.search(piece) for piece in rest):
        return text, (), True
    before, after = rest[0].removesuffix("\n"), "".join(rest[1:])
    return before + after if after.strip() else before, tuple(calls), False


def parse_deepseek_r1(text: str, opened: bool) -> tuple[str, str]:
    """Return reasoning and content. The opening tag may be missing; without any tag, and if the prompt did not open
    `<think>`, everything is content."""
    head, tag, tail = text.partition(END_THINK)
    if not tag and not opened and not text.lstrip().startswith(THINK):
        return "", text
    reasoning = head.lstrip().removeprefix(THINK) if head.lstrip().startswith(THINK) else head
    return reasoning.strip("\n"), tail.lstrip("\n")


def parse_qwen3(text: str, opened: bool) -> tuple[str, str]:
    """Like `parse_deepseek_r1`, but the text or the prompt must open `<think>`."""
    if not opened and not text.lstrip().startswith(THINK):
        return "", text
    return parse_deepseek_r1(text, opened)


TOOL_PARSERS: Mapping[str, ToolParser] = {"hermes": parse_hermes}
REASONING_PARSERS: Mapping[str, ReasoningParser] = {"deepseek_r1": parse_deepseek_r1, "qwen3": parse_qwen3}


def parse_text(
    text: str, *, tools: bool, opened: bool, tool_parser: ToolParser | None, reasoning_parser: ReasoningParser | None
) -> ParsedText:
    """Parse reasoning, then tool calls in the remaining text (only if tools were offered)."""
    reasoning = ""
    if reasoning_parser is not None:
        reasoning, text = reasoning_parser(text, opened)
    if not tools or tool_parser is None:
        return ParsedText(content=text, reasoning=reasoning)
    content, calls, malformed = tool_parser(text)
    return ParsedText(content=content, reasoning=reasoning, tool_calls=calls, tool_parse_error=malformed)


_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def _parse_call(text: str) -> ToolCall | None:
    """Parse `{"name": ..., "arguments": {...}}`, keeping the arguments' substring; None for anything else."""
    try:
        members = _members(text.strip())
    except (ValueError, RecursionError):
        return None
    if set(members) != {"name", "arguments"}:
        return None
    name, arguments = members["name"][0], members["arguments"]
    if not isinstance(name, str) or not name or not is_text(name) or not isinstance(arguments[0], dict):
        return None
    return ToolCall(name=name, arguments=arguments[1])


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """Return each member of a JSON object: its value and the value's substring. Raises `ValueError` for other text."""
    if not text.startswith("{"):
        raise ValueError("not an object")
    members: dict[str, tuple[Any, str]] = {}
    at = _skip(text, 1)
    while True:
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or key in members or text[at : at + 1] != ":":
            raise ValueError("not a member")
        start = _skip(text, at + 1)
        value, end = _DECODER.raw_decode(text, start)
        members[key] = (value, text[start:end])
        at = _skip(text, end)
        separator, at = text[at : at + 1], at + 1
        if separator == "}" and at == len(text):
            return members
        if separator != ",":
            raise ValueError("not an object")
        at = _skip(text, at)


def _skip(text: str, at: int) -> int:
    match = WHITESPACE.match(text, at)
    assert match is not None  # it matches the empty string
    return match.end()
