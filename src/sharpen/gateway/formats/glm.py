"""GLM 4.5 to 4.7: a name with `<arg_key>` and `<arg_value>` elements between `<tool_call>` tags.

A value stands unescaped and without its type, which comes from the tool's schema. GLM 4.5 and 4.6 write each element on
a line of its own, GLM 4.7 without newlines. Source: the chat templates of zai-org/GLM-4.5-Air and GLM-4.7.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sharpen.gateway.formats.format import ParsedCalls, ToolCall, ToolFormat, Tools
from sharpen.gateway.formats.grammar import GrammarWriter, Markup, OfferedTool, literal, one_of
from sharpen.gateway.formats.scan import element_value, past, scan
from sharpen.gateway.formats.schema import typed_call
from sharpen.gateway.formats.tool_rules import Element, element_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"<tool_call>\s*([^<>\s]+)\s*")
_ARGUMENT = re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>")
_CLOSES = re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)")


def parse(text: str, tools: Tools) -> ParsedCalls:
    """Read the calls. One newline before the first call belongs to the template and is not content."""

    def read(text: str, start: int) -> tuple[list[ToolCall], int] | None:
        match = _NAME.match(text, start)
        if match is None:
            return None
        name, at = match[1], match.end()
        values: dict[str, str] = {}
        while (match := _ARGUMENT.match(text, at)) is not None:
            found = element_value(text, match.end(), _CLOSES)
            if found is None or match[1] in values:
                return None
            values[match[1]], at = found
        end, call = past(text, at, CLOSE), typed_call(name, values, tools)
        return None if end is None or call is None else ([call], end)

    return scan(text, OPEN, (OPEN, CLOSE, "<arg_key>", "</arg_value>"), read, newlines=1)


def _opens(writer: GrammarWriter, key: str) -> str:
    begin, end, value = (writer.markup(tag) for tag in ("<arg_key>", "</arg_key>", "<arg_value>"))
    return rf'{begin} {literal(key)} {end} "\n"? {value}'


_ELEMENT = Element(
    name="glm45",
    opens=_opens,
    any_opens="any_key",
    is_key=lambda key: re.fullmatch("[^<]+", key) is not None,
    closes="</arg_value>",
    after=r'"\n"?',
)


def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
    """The grammar of calls, with newlines or without."""
    name = writer.up_to("any_name", "</arg_key>", "[^<]+")
    writer.add("any_key", rf'{writer.markup("<arg_key>")} {name} "\n"? {writer.markup("<arg_value>")}')
    calls = [rf'{literal(tool.name)} "\n"? {element_rules(writer, _ELEMENT, tool)}' for tool in tools]
    call = writer.add("call", f"{one_of(calls)} {writer.markup(CLOSE)}")
    return writer.tagged(OPEN, call, r'"\n"?' if several else None)


GLM45 = ToolFormat(name="glm45", parse=parse, opens=(OPEN,), marks=((OPEN, "<arg_key>"),), vllm="glm45", markup=markup)
