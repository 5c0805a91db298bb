"""Llama 3 and 4: the whole answer is one JSON object with `name` and `parameters`, or several separated by semicolons.

`<|python_tag|>` may stand before them. Source: the chat templates of meta-llama/Llama-3.1-8B-Instruct and
Llama-3.2-3B-Instruct, and Meta's prompt formats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sharpen.gateway.formats.format import ParsedCalls, ToolFormat, Tools
from sharpen.gateway.formats.grammar import (
    KEY_SEPARATOR,
    SPACE,
    GrammarWriter,
    Markup,
    OfferedTool,
    named_object,
)
from sharpen.gateway.formats.scan import named_call, object_at, skip

TAG = "<|python_tag|>"
_BEGIN = re.compile(r'\s*(?:<\|python_tag\|>|\{\s*"name"\s*:)')


def parse(text: str, _: Tools) -> ParsedCalls:
    """Read the calls. An answer that begins with neither the tag nor an object whose first member is `name` has none:
    it may well be JSON."""
    if _BEGIN.match(text) is None:
        return text, (), TAG in text
    calls = []
    at = skip(text, 0)
    at += len(TAG) if text.startswith(TAG, at) else 0
    while (found := object_at(text, at)) is not None:
        call = named_call(found[0], arguments="parameters") or named_call(found[0])
        if call is None:
            break
        calls.append(call)
        at = skip(text, found[1])
        if at == len(text):
            return "", tuple(calls), False
        if text[at] != ";":
            break
        at += 1
    return text, (), True


def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
    """The grammar of one call: the templates write no more."""
    body = writer.add("body", " | ".join(named_object(writer, tool, "parameters") for tool in tools))
    return writer.whole(
        rf'"{{" "\"name\"" {KEY_SEPARATOR} {body} "}}"',
        beside_text=rf'"{{\"name\":" " "? {body} "}}"',
        begins=rf'{SPACE}\{{{SPACE}"name"{SPACE}:',
        tags=(TAG,),
    )


LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    parse=parse,
    opens=(TAG,),
    marks=(('{"name": ', '"parameters": ', "<|start_header_id|>"), ('{"name": ', '"parameters": ', "<|header_start|>")),
    vllm="llama3_json",
    markup=markup,
    names=".+",
    begins=("{",),
)
