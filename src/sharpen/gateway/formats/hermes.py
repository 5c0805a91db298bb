"""Hermes, and Qwen 2.5 and 3: a JSON object with `name` and `arguments` between `<tool_call>` tags.

Source: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B and Qwen/Qwen3-0.6B.
"""

from __future__ import annotations

from collections.abc import Sequence

from sharpen.gateway.formats.format import ParsedCalls, ToolCall, ToolFormat, Tools
from sharpen.gateway.formats.grammar import GrammarWriter, Markup, OfferedTool, named_object
from sharpen.gateway.formats.scan import named_call, object_at, past, scan

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(text: str, _: Tools) -> ParsedCalls:
    """Read the calls. One newline before the first call belongs to the template and is not content."""
    return scan(text, OPEN, (OPEN, CLOSE), _read, newlines=1)


def _read(text: str, start: int) -> tuple[list[ToolCall], int] | None:
    if (found := object_at(text, start + len(OPEN))) is None:
        return None
    written, at = found
    end, call = past(text, at, CLOSE), named_call(written)
    return None if end is None or call is None else ([call], end)


def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
    """The grammar of calls."""
    body = writer.add("body", " | ".join(named_object(writer, tool, "arguments") for tool in tools))
    call = writer.add("call", rf'"\n"? "{{\"name\":" " "? {body} "}}" "\n"? {writer.markup(CLOSE)}')
    return writer.tagged(OPEN, call, r'"\n"?' if several else None)


HERMES = ToolFormat(
    name="hermes", parse=parse, opens=(OPEN,), marks=((OPEN, '"arguments'),), vllm="hermes", markup=markup, names=".+"
)
