"""Qwen3-Coder and Qwen 3.5 and later: `<function=name>` with `<parameter=key>` elements between `<tool_call>` tags.

A value stands between two newlines, unescaped and without its type, which comes from the tool's schema. It ends at the
first `</parameter>` that another parameter or the function's end follows, so that values may contain such tags; an
object or a list ends where its JSON does.
Source: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen/Qwen3.5-4B.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sharpen.gateway.formats.format import ParsedCalls, ToolCall, ToolFormat, Tools
from sharpen.gateway.formats.grammar import GrammarWriter, Markup, OfferedTool, literal
from sharpen.gateway.formats.scan import element_value, past, scan
from sharpen.gateway.formats.schema import typed_call
from sharpen.gateway.formats.tool_rules import Element, element_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<tool_call>\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_CLOSES = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")


def parse(text: str, tools: Tools) -> ParsedCalls:
    """Read the calls. Two newlines before the first call belong to the template and are not content."""

    def read(text: str, start: int) -> tuple[list[ToolCall], int] | None:
        match = _FUNCTION.match(text, start)
        if match is None:
            return None
        name, at = match[1], match.end()
        values: dict[str, str] = {}
        while (match := _PARAMETER.match(text, at)) is not None:
            found = element_value(text, match.end(), _CLOSES)
            if found is None or match[1] in values:
                return None
            values[match[1]], at = found
        end = past(text, at, "</function>")
        end = None if end is None else past(text, end, CLOSE)
        call = typed_call(name, values, tools)
        return None if end is None or call is None else ([call], end)

    return scan(text, OPEN, (OPEN, CLOSE, "<function=", "</function>"), read, newlines=2)


_ELEMENT = Element(
    name="qwen3_coder",
    opens=lambda _, key: literal(f"<parameter={key}>\n"),
    any_opens=r'"<parameter=" /[^<>\n]+/ ">\n"',
    is_key=lambda key: re.fullmatch(r"[^<>\n]+", key) is not None,
    lead="\n",
    closes="</parameter>",
    after=r'"\n"',
)


def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
    """The grammar of calls, with the newlines that the templates write."""
    calls = [literal(f"<function={tool.name}>\n") + " " + element_rules(writer, _ELEMENT, tool) for tool in tools]
    body = writer.add("body", " | ".join(calls))
    call = writer.add("call", rf'"\n" {body} "</function>\n" {writer.markup(CLOSE)}')
    return writer.tagged(OPEN, call, r'"\n"' if several else None)


QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    parse=parse,
    opens=(OPEN,),
    marks=((OPEN, "<function=", "<parameter="),),
    vllm="qwen3_coder",
    markup=markup,
)
