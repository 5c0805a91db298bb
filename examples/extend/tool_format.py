"""A format of one's own: tool calls as Phi-4-mini writes them, a JSON list between two tokens.

sharpen run --config run.yaml --set model.tool_call_parser=examples/extend/tool_format.py:PHI4_MINI
"""

from collections.abc import Sequence

from sharpen.gateway.formats.format import ParsedCalls, ToolCall, ToolFormat, Tools
from sharpen.gateway.formats.grammar import GrammarWriter, Markup, OfferedTool, named_object
from sharpen.gateway.formats.scan import named_call, object_at, past, scan

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"


def parse(text: str, tools: Tools) -> ParsedCalls:
    """Read `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>`; what is malformed stays text."""
    return scan(text, OPEN, (OPEN, CLOSE), _read)


def _read(text: str, start: int) -> tuple[list[ToolCall], int] | None:
    calls: list[ToolCall] = []
    at: int | None = past(text, start + len(OPEN), "[")
    while at is not None:
        if (found := object_at(text, at)) is None or (call := named_call(found[0])) is None:
            return None
        calls.append(call)
        if (end := past(text, found[1], "]")) is not None:
            end = past(text, end, CLOSE)
            return None if end is None else (calls, end)
        at = past(text, found[1], ",")
    return None


def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
    """The grammar of calls, for answers that must be calls or whose arguments must follow a schema."""
    body = writer.add("body", " | ".join(named_object(writer, tool, "arguments") for tool in tools))
    item = writer.add("item", rf'"{{\"name\":" " "? {body} "}}"')
    more = f' ("," " "? {item})*' if several else ""
    return writer.tagged(OPEN, writer.add("call", f'"[" {item}{more} "]" {writer.markup(CLOSE)}'), None)


PHI4_MINI = ToolFormat(
    name="phi4_mini",
    parse=parse,
    opens=(OPEN,),
    marks=((OPEN, CLOSE),),
    vllm="phi4_mini_json",
    markup=markup,
    names=".+",
)
