"""Kimi K2: calls in a section of special tokens, each with its id, `functions.name:number`, and JSON arguments.

Source: the chat template of moonshotai/Kimi-K2-Thinking.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sharpen.gateway.formats.format import ParsedCalls, ToolCall, ToolFormat, Tools
from sharpen.gateway.formats.grammar import GrammarWriter, Markup, OfferedTool, literal, one_of
from sharpen.gateway.formats.scan import object_at, past, scan

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(rf"\s*{re.escape(CALL)}\s*((?:functions\.)?([^\s<>:]+):\d+)\s*{re.escape(ARGUMENTS)}")


def parse(text: str, _: Tools) -> ParsedCalls:
    """Read the calls of all sections."""
    return scan(text, SECTION, (SECTION, END_SECTION, CALL, ARGUMENTS, END_CALL), _read)


def _read(text: str, start: int) -> tuple[list[ToolCall], int] | None:
    calls = []
    at = start + len(SECTION)
    while (end := past(text, at, END_SECTION)) is None:
        match = _HEAD.match(text, at)
        found = None if match is None else object_at(text, match.end())
        after = None if found is None else past(text, found[1], END_CALL)
        if match is None or found is None or after is None:
            return None
        calls.append(ToolCall(name=match[2], arguments=found[0], id=match[1]))
        at = after
    return calls, end


def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
    """The grammar of a section of calls."""
    head, arguments = writer.markup(CALL), writer.markup(ARGUMENTS)
    calls = [
        f"{head} {literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {arguments} {writer.arguments(tool)}"
        for tool in tools
    ]
    call = writer.add("call", f"{one_of(calls)} {writer.markup(END_CALL)}")
    return writer.tagged(SECTION, f"{call}{'+' if several else ''} {writer.markup(END_SECTION)}", None)


KIMI_K2 = ToolFormat(
    name="kimi_k2", parse=parse, opens=(SECTION,), marks=((SECTION, ARGUMENTS),), vllm="kimi_k2", markup=markup
)
