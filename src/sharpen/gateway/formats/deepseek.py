"""DeepSeek V3, R1 and V3.1: calls in a section of special tokens.

V3 and R1 write a call's type and name, then the arguments as a block of JSON code; V3.1 writes the name and the
arguments. Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from sharpen.gateway.formats.format import ParsedCalls, ToolCall, ToolFormat, Tools
from sharpen.gateway.formats.grammar import GrammarWriter, Markup, OfferedTool, one_of
from sharpen.gateway.formats.scan import is_name, object_at, past, scan, skip

SECTION, END_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_TAGS = (SECTION, END_SECTION, CALL, SEPARATOR, END_CALL)
_V3_HEAD = re.compile(f"{CALL}function{SEPARATOR}([^\n<]+)\n```json\n")
_V31_HEAD = re.compile(f"{CALL}([^\n<]+){SEPARATOR}")


def _parser(head: re.Pattern[str], tail: str) -> Callable[[str, Tools], ParsedCalls]:
    """Return a parser of calls whose arguments stand between `head`, which has the name, and `tail`."""

    def read(text: str, start: int) -> tuple[list[ToolCall], int] | None:
        calls = []
        at = start + len(SECTION)
        while (end := past(text, at, END_SECTION)) is None:
            match = head.match(text, skip(text, at))
            found = None if match is None else object_at(text, match.end())
            after = None if found is None else past(text, found[1], tail)
            if match is None or found is None or after is None or not is_name(match[1]):
                return None
            calls.append(ToolCall(name=match[1], arguments=found[0]))
            at = after
        return calls, end

    return lambda text, _: scan(text, SECTION, _TAGS, read)


def _markup(
    before: str, behind: str, closes: str, between: str
) -> Callable[[GrammarWriter, Sequence[OfferedTool], bool], Markup]:
    """Return the grammar of calls whose name stands between `before` and `behind`, and whose arguments before
    `closes`, with `between` between two calls."""

    def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
        calls = [f"{writer.markup(before + tool.name + behind)} {writer.arguments(tool)}" for tool in tools]
        call = writer.add("call", f"{one_of(calls)} {writer.markup(closes)}")
        more = f" ({writer.markup(between)} {call})*" if several else ""
        return writer.tagged(SECTION, f"{call}{more} {writer.markup(END_SECTION)}", None)

    return markup


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    parse=_parser(_V3_HEAD, f"```{END_CALL}"),
    opens=(SECTION,),
    marks=((SECTION, "```json"),),
    vllm="deepseek_v3",
    markup=_markup(f"{CALL}function{SEPARATOR}", "\n```json\n", f"\n```{END_CALL}", "\n"),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    parse=_parser(_V31_HEAD, END_CALL),
    opens=(SECTION,),
    marks=((SECTION,),),
    vllm="deepseek_v31",
    markup=_markup(CALL, SEPARATOR, END_CALL, ""),
)
