"""Hermes and Qwen 2.5 and 3: a JSON object with `name` and `arguments` between `<tool_call>` tags.

Source: the chat templates of NousResearch/Hermes-2-Pro and Qwen/Qwen3-0.6B.
"""

from __future__ import annotations

import re

from sharpen.gateway.formats.format import ParsedCalls, ToolFormat, Tools
from sharpen.gateway.formats.json_text import named_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAG = re.compile(r"</?tool_call>")


def parse(text: str, _: Tools) -> ParsedCalls:
    """Read the calls. One newline before the first call belongs to the template and is not content."""
    if _TAG.search(text) is None:
        return text, (), False
    calls = []
    rest = []
    end = 0
    for match in _CALL.finditer(text):
        call = named_call(match.group(1))
        if call is None:
            return text, (), True
        calls.append(call)
        rest.append(text[end : match.start()])
        end = match.end()
    rest.append(text[end:])
    if not calls or any(_TAG.search(piece) for piece in rest):
        return text, (), True
    before, after = rest[0].removesuffix("\n"), "".join(rest[1:])
    return before + after if after.strip() else before, tuple(calls), False


HERMES = ToolFormat(name="hermes", parse=parse, opens=(OPEN,))
