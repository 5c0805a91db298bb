"""Mistral: calls after `[TOOL_CALLS]`, and reasoning between `[THINK]` tags (Magistral).

Tokenizers before version 11 write one JSON list of objects with `name`, `arguments` and `id`; later ones write each
call as `[TOOL_CALLS]name[ARGS]{...}`, version 11 with `[CALL_ID]` and the id before the arguments.
Source: the chat templates of mistralai/Mistral-Small-3.1-24B-Instruct-2503 and Mistral-Small-3.2, and the tokenizers'
documentation in mistral-common.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sharpen.gateway.formats.format import ParsedCalls, ReasoningFormat, ToolCall, ToolFormat, Tools, between
from sharpen.gateway.formats.grammar import (
    ITEM_SEPARATOR,
    GrammarWriter,
    Markup,
    OfferedTool,
    literal,
    named_object,
    one_of,
)
from sharpen.gateway.formats.scan import is_name, members_of, object_at, past, scan, skip

OPEN = "[TOOL_CALLS]"
_ID = "/[a-zA-Z0-9]{9}/"
_HEAD = re.compile(r"\[TOOL_CALLS\]\s*([^\[\]{}\s]+)(?:\[CALL_ID\]([^\[\]{}\s]+))?(?:\[ARGS\])?(?=\s*\{)")


def parse(text: str, _: Tools) -> ParsedCalls:
    """Read the calls of either form."""
    return scan(text, OPEN, (OPEN, "[ARGS]", "[CALL_ID]"), _read)


def _read(text: str, start: int) -> tuple[list[ToolCall], int] | None:
    if (at := past(text, start + len(OPEN), "[")) is not None:
        return _list(text, at)
    match = _HEAD.match(text, start)
    found = None if match is None else object_at(text, match.end())
    if match is None or found is None or not is_name(match[1]):
        return None
    return [ToolCall(name=match[1], arguments=found[0], id=match[2])], found[1]


def _list(text: str, at: int) -> tuple[list[ToolCall], int] | None:
    """Read a list of objects from behind its bracket."""
    calls: list[ToolCall] = []
    while (found := object_at(text, at)) is not None and (call := _call(found[0])) is not None:
        calls.append(call)
        at = skip(text, found[1])
        separator, at = text[at : at + 1], at + 1
        if separator == "]":
            return calls, at
        if separator != ",":
            return None
    return None


def _call(written: str) -> ToolCall | None:
    try:
        members = members_of(written)
    except ValueError:  # a member's name stands there twice
        return None
    if not {"name", "arguments"} <= set(members) <= {"name", "arguments", "id"}:
        return None
    name, (value, arguments), call_id = members["name"][0], members["arguments"], members.get("id", (None, ""))[0]
    if not is_name(name) or not isinstance(value, dict) or not (call_id is None or is_name(call_id)):
        return None
    return ToolCall(name=name, arguments=arguments, id=call_id)


def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
    """The grammar of calls, in the form of the tokenizer: `[ARGS]` came when the list went."""
    if writer.token_id("[ARGS]") is None:
        calls = [rf'"{{\"name\": " {named_object(writer, tool, "arguments")}' for tool in tools]
        call = writer.add("call", rf'{one_of(calls)} ({ITEM_SEPARATOR} "\"id\": \"" {_ID} "\"")? "}}"')
        more = f" ({ITEM_SEPARATOR} {call})*" if several else ""
        return writer.tagged(OPEN, f'" "? "[" {call}{more} "]"', None)
    own_id = f"({writer.markup('[CALL_ID]')} {_ID})?" if writer.token_id("[CALL_ID]") is not None else ""
    head = f"{own_id} {writer.markup('[ARGS]')}"
    calls = [f"{literal(tool.name)} {head} {writer.arguments(tool)}" for tool in tools]
    return writer.tagged(OPEN, writer.add("call", " | ".join(calls)), '""' if several else None)


MISTRAL = ToolFormat(
    name="mistral", parse=parse, opens=(OPEN,), marks=((OPEN,),), vllm="mistral", markup=markup, short_ids=True
)
MISTRAL_THINK = ReasoningFormat(
    name="mistral",
    parse=lambda text, opened: between(text, "[THINK]", "[/THINK]", opened=opened),
    opens=("[THINK]",),
    closes=("[/THINK]",),
    marks=(("[THINK]", "[/THINK]"),),
    vllm="mistral",
    special_tokens=True,
)
