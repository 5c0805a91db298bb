"""Gemma 4, and FunctionGemma: calls as `call:name{key:value}`, with delimiters of their own around strings.

Objects have bare names, and nothing is escaped. Gemma 4 reasons in a channel of its own.
Source: the chat templates of google/gemma-4-E2B-it and google/functiongemma-270m-it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from sharpen.gateway.formats.format import ParsedCalls, ReasoningFormat, ToolCall, ToolFormat, Tools, between
from sharpen.gateway.formats.grammar import ANY, GrammarWriter, Markup, OfferedTool, literal
from sharpen.gateway.formats.scan import past, quoted, scan, skip
from sharpen.gateway.formats.tool_rules import Notation, ValueRules

_NAME = re.compile(r"call:([^\s:{}<>]+)(?=\{)")
_KEY = re.compile(r"\s*([^\s:,{}\[\]<>](?:[^:,{}\[\]<>]*[^\s:,{}\[\]<>])?)\s*:")
_WORD = re.compile(r"\s*(?:(-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)|(\w+))")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
"""Templates write a missing value in Python's word."""
MAX_DEPTH = 100


class _Reader:
    """Reads the values of one text, as JSON. Each method takes a place and returns the JSON text and the place after
    it, and raises `ValueError` for what is not a value."""

    def __init__(self, text: str, delimiter: str) -> None:
        self._text = text
        self._delimiter = delimiter

    def value(self, at: int, depth: int = 0) -> tuple[str, int]:
        at = skip(self._text, at)
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        if self._text.startswith(self._delimiter, at):
            return self._string(at)
        if self._text.startswith("{", at):
            return self._items(at, "{}", lambda at: self._member(at, depth))
        if self._text.startswith("[", at):
            return self._items(at, "[]", lambda at: self.value(at, depth + 1))
        match = _WORD.match(self._text, at)
        if match is None or not (match[1] or match[2] in _WORDS):
            raise ValueError("not a value")
        return match[1] or _WORDS[match[2]], match.end()

    def _string(self, at: int) -> tuple[str, int]:
        start = at + len(self._delimiter)
        end = self._text.index(self._delimiter, start)
        return quoted(self._text[start:end]), end + len(self._delimiter)

    def _member(self, at: int, depth: int) -> tuple[str, int]:
        match = _KEY.match(self._text, at)
        if match is None:
            raise ValueError("not a name")
        value, end = self.value(match.end(), depth + 1)
        return f"{quoted(match[1])}: {value}", end

    def _items(self, at: int, brackets: str, read: Callable[[int], tuple[str, int]]) -> tuple[str, int]:
        items = []
        at = skip(self._text, at + 1)
        while not self._text.startswith(brackets[1], at):
            item, at = read(at)
            items.append(item)
            at = skip(self._text, at)
            if self._text.startswith(",", at):
                at = skip(self._text, at + 1)
            elif not self._text.startswith(brackets[1], at):
                raise ValueError("not an item")
        return f"{brackets[0]}{', '.join(items)}{brackets[1]}", at + 1


def _parser(opens: str, closes: str, delimiter: str) -> Callable[[str, Tools], ParsedCalls]:
    """Return a parser of calls between two tags, with strings between two of `delimiter`."""

    def read(text: str, start: int) -> tuple[list[ToolCall], int] | None:
        match = _NAME.match(text, skip(text, start + len(opens)))
        if match is None:
            return None
        try:
            arguments, at = _Reader(text, delimiter).value(match.end())
        except ValueError:
            return None
        end = past(text, at, closes)
        return None if end is None else ([ToolCall(name=match[1], arguments=arguments)], end)

    return lambda text, _: scan(text, opens, (opens, closes), read)


_BARE = r"[^\s:,{}\[\]<>]([^:,{}\[\]<>]*[^\s:,{}\[\]<>])?"


def _markup(
    opens: str, closes: str, delimiter: str, name: str
) -> Callable[[GrammarWriter, Sequence[OfferedTool], bool], Markup]:
    """Return the grammar of what `_parser` of the same texts reads. Names are in the templates' order."""

    def string(writer: GrammarWriter, times: str) -> str:
        rule = "string" if times == "*" else f"string_{re.sub('[^0-9]', '_', times)}"
        if not writer.has(rule):
            writer.up_to(rule, delimiter, f"{ANY}{times}")
        return f"{writer.markup(delimiter)} {rule}"

    notation = Notation(
        name=name,
        string=string,
        quoted=lambda writer, text: f"{writer.markup(delimiter)} {literal(text)} {writer.markup(delimiter)}",
        key=lambda key: literal(f"{key}:"),
        any_key=f'/{_BARE}/ ":"',
        is_key=lambda key: re.fullmatch(_BARE, key) is not None,
        words={True: ("true",), False: ("false",), None: ("null", "None")},
        comma='","',
        by_name=True,
    )

    def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
        calls = [literal(f"call:{tool.name}") + " " + ValueRules(writer, notation, tool).object() for tool in tools]
        call = writer.add("call", f"({' | '.join(calls)}) {writer.markup(closes)}")
        return writer.tagged(opens, call, '""' if several else None)

    return markup


GEMMA4 = ToolFormat(
    name="gemma4",
    parse=_parser("<|tool_call>", "<tool_call|>", '<|"|>'),
    opens=("<|tool_call>",),
    marks=(("<|tool_call>", "<tool_call|>"),),
    vllm="gemma4",
    markup=_markup("<|tool_call>", "<tool_call|>", '<|"|>', "gemma4"),
)
FUNCTIONGEMMA = ToolFormat(
    name="functiongemma",
    parse=_parser("<start_function_call>", "<end_function_call>", "<escape>"),
    opens=("<start_function_call>",),
    marks=(("<start_function_call>",),),
    vllm="functiongemma",
    markup=_markup("<start_function_call>", "<end_function_call>", "<escape>", "functiongemma"),
)
THOUGHT, END_THOUGHT = "<|channel>thought", "<channel|>"
GEMMA4_THOUGHT = ReasoningFormat(
    name="gemma4",
    parse=lambda text, opened: between(text, THOUGHT, END_THOUGHT, opened=opened),
    opens=(THOUGHT,),
    closes=(END_THOUGHT,),
    marks=((THOUGHT,), ("<|channel>", END_THOUGHT)),
    vllm="gemma4",
    special_tokens=True,
)
