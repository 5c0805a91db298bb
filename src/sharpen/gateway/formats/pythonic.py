"""Calls as a list of Python calls, `[f(a=1, b="x"), g()]`: Llama 3.2 and 4 prompted so, ToolACE, LFM2.

The whole answer is the list. LFM2 writes it between `<|tool_call_start|>` and `<|tool_call_end|>`, with content around
it, Llama 4 between `<|python_start|>` and `<|python_end|>`. Source: Meta's prompt formats of Llama 3.2 and 4, and the
chat template of LiquidAI/LFM2.5-8B-A1B.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

from sharpen.gateway.body import is_text
from sharpen.gateway.formats.format import ParsedCalls, ToolCall, ToolFormat, Tools
from sharpen.gateway.formats.grammar import (
    ANY,
    SPACE,
    GrammarWriter,
    Markup,
    OfferedTool,
    literal,
    one_of,
    pattern,
)
from sharpen.gateway.formats.tool_rules import Notation, ValueRules

_TAGS = ("<|tool_call_start|>", "<|tool_call_end|>", "<|python_start|>", "<|python_end|>")
_TAGGED = re.compile(r"(.*?)<\|(tool_call_start|python_start)\|>(.*?)<\|(tool_call_end|python_end)\|>(.*)", re.DOTALL)
_BEGIN = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")
_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_WORDS = {"true": True, "false": False, "null": None}
MAX_LENGTH = 1_000_000
"""Longer text is no list of calls: Python's parser could need too much memory for it."""


def parse(text: str, _: Tools) -> ParsedCalls:
    """Read the calls of the list."""
    before, written, after = "", text, ""
    if (match := _TAGGED.fullmatch(text)) is not None:
        before, written, after = match[1], match[3], match[5]
    if any(tag in piece for piece in (before, written, after) for tag in _TAGS):
        return text, (), True
    if match is None and _BEGIN.match(text) is None:
        return text, (), False
    calls = _calls(written.strip())
    if not calls:
        return text, (), True
    return before + after if after.strip() else before, calls, False


def _calls(written: str) -> tuple[ToolCall, ...]:
    """Return the calls of a list; none for anything else."""
    if len(written) > MAX_LENGTH:
        return ()
    try:
        with warnings.catch_warnings(action="ignore"):  # of "\d", which stays as it is
            value = ast.parse(written, mode="eval").body
        return tuple(map(_call, value.elts)) if isinstance(value, ast.List) else ()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _call(call: ast.expr) -> ToolCall:
    """Return one call. Raises `ValueError` for what is not a call with literal arguments by name."""
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with arguments by name")
    arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if None in arguments or len(arguments) < len(call.keywords) or not is_text(written):
        raise ValueError("not a call with arguments by name")
    return ToolCall(name=ast.unparse(_name(call.func)), arguments=written)


def _name(function: ast.expr) -> ast.expr:
    inner = function
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    if not isinstance(inner, ast.Name):
        raise ValueError("not a name")
    return function


def _literal(value: ast.expr) -> Any:
    """Return the value of a literal of Python or JSON. Raises `ValueError` for anything else."""
    match value:
        case ast.Constant(value=str() | bool() | int() | float() | None as constant):
            if isinstance(constant, float) and not math.isfinite(constant):
                raise ValueError("not finite")
            return constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("not an object")
            return dict(zip(names, map(_literal, values), strict=True))
    raise ValueError("not a literal")


def _string(writer: GrammarWriter, times: str) -> str:
    """Between quotes of either kind, with the escapes that Python and JSON have alike, and without the lists' tags."""
    name = f"STRING_{re.sub('[^0-9]', '_', times)}"
    kinds = [rf"{mark}([^{mark}\\\x00-\x1f\x7f]|\\[{mark}\\nrt]){times}{mark}" for mark in ("'", '"')]
    tags = "|".join(map(pattern, _TAGS))
    return writer.add(name, f"/{'|'.join(kinds)}/ & ~/{ANY}*({tags}){ANY}*/")


_NOTATION = Notation(
    name="pythonic",
    string=_string,
    quoted=lambda _, text: literal(repr(text)),
    key=lambda key: f"{literal(repr(key))} /: ?/",
    any_key="STRING__ /: ?/",
    words={True: ("True", "true"), False: ("False", "false"), None: ("None", "null")},
    comma="/, ?/",
)


def _is_argument(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], several: bool) -> Markup:
    """The grammar of a list, between LFM2's tags if the tokenizer has them; else it is the whole answer."""
    writer.add("ARGUMENT", f"/{_NAME}/ & ~/{'|'.join(keyword.kwlist)}/")
    _string(writer, "*")
    arguments = [writer.add(f"arguments_{tool.number}", _arguments(writer, tool)) for tool in tools]
    pairs = list(zip(tools, arguments, strict=True))
    call = writer.add("call", " | ".join(f'{literal(f"{tool.name}(")} {inner} ")"' for tool, inner in pairs))
    more = f" ({_NOTATION.comma} {call})*" if several else ""
    if writer.token_id(_TAGS[0]) is not None:
        return writer.once(_TAGS[0], f'"[" {call}{more} "]" {writer.markup(_TAGS[1])}', _TAGS)
    first = one_of([f'{literal(f"[{tool.name}(")} {inner} ")"' for tool, inner in pairs])
    return writer.whole(
        f'"[" {call}{more} "]"',
        beside_text=f'{first}{more} "]"',
        begins=rf"{SPACE}\[{SPACE}[A-Za-z_][\w.]*\(",
        tags=_TAGS,
    )


def _arguments(writer: GrammarWriter, tool: OfferedTool) -> str:
    values = ValueRules(writer, _NOTATION, tool)
    known = values.members(lambda name: literal(f"{name}="), _is_argument)
    return values.any_members('ARGUMENT "="') if known is None else known


PYTHONIC = ToolFormat(
    name="pythonic",
    parse=parse,
    opens=("<|tool_call_start|>", "<|python_start|>"),
    marks=(("<|tool_call_start|>", "<|tool_call_end|>"), ("func_name1(params_name1=params_value1",)),
    vllm="pythonic",
    markup=markup,
    names=rf"{_NAME}(\.{_NAME})*",
    begins=("[",),
)
