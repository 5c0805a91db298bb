"""What a request asks of the form of its answer, as a grammar for the engine.

In: the fields of a request (`response_format`, `tool_choice`, `strict` tools, or what other protocols call them), and
the formats in which the model writes. Out: a `Constraint`, which is recorded with the call. The grammar covers the
whole response: reasoning comes first, unconstrained up to the text that closes it, if the prompt leaves room for it.

JSON has no whitespace but one space or newline after a comma and a space after a colon, so that no answer can consist
of whitespace. Schemas that are not strict may use keywords that llguidance does not know, which then have no effect.
How calls are written, and what no grammar of them can hold, each tool format says (`formats/`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sharpen.errors import ConstraintError
from sharpen.gateway.formats.format import ReasoningFormat, ToolFormat
from sharpen.gateway.formats.grammar import ANY_OBJECT, GrammarWriter, Markup, OfferedTool, TokenId
from sharpen.gateway.formats.table import Formats
from sharpen.gateway.requests import ApiError, CallRequest, Form, short_repr
from sharpen.types import Constraint


def form_of(
    fields: tuple[str, str, str],
    *,
    schema: Mapping[str, Any] | None,
    strict: bool,
    strict_tools: Collection[str],
    called: Sequence[str] | None,
    single: bool,
) -> Form | None:
    """Return what a request asks of its answer; None if any text will do.

    `schema` is of the answer, if it is no tool call; `strict` says that all of it must be enforced. `strict_tools` are
    the tools whose arguments must match their schemas. `called` are the tools of which one must be called, or empty for
    all; None: none need be called. `single`: one call of these, not several. `fields` are the protocol's names of the
    schema, of the choice of tools, and of the tools.
    """
    if schema is None and called is None and not strict_tools:
        return None
    return Form(
        origin=fields[0] if called is None and schema is not None else fields[2] if called is None else fields[1],
        schema=schema,
        strict=strict,
        strict_tools=frozenset(strict_tools),
        called=None if called is None else tuple(called),
        single=single,
    )


def schema_of(form: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, bool]:
    """Return the schema that OpenAI's `response_format` or `text.format` asks for, None for any text, and whether it is
    strict. In the first it is one level deeper."""
    if not form or form["type"] == "text":
        return None, False
    if form["type"] == "json_object":
        return ANY_OBJECT, False
    about = form.get("json_schema") or form
    return about["schema"], bool(about.get("strict"))


def constraint_of(
    request: CallRequest, prompt_text: str, formats: Formats, token_id: TokenId
) -> tuple[Constraint | None, Sequence[str]]:
    """Return the constraint of a request's answer, None without one, and notes: what it asks and is not enforced.

    Raises `ApiError` if the answer's schema cannot be combined with what else the request or the model's format asks.
    """
    form = request.form
    if form is None:
        return None, ()
    if request.continue_final:
        if form.schema is not None:
            raise ApiError(f"'{form.origin}' cannot constrain an answer whose beginning is given.", param=form.origin)
        return None, (_not_enforced(form, "the beginning of the answer is given"),)
    writer = GrammarWriter(token_id)
    markup = None
    if request.tools:
        try:
            markup = _markup(writer, request.tools, form, formats.tool)
        except _NoGrammar as why:
            if form.schema is None:
                return None, (_not_enforced(form, str(why)),)
            raise ApiError(f"'{form.origin}' with tools: {why}; send one of the two.", param=form.origin) from None
    before = _before(writer, formats.reasoning, prompt_text)
    if form.schema is None or form.called is not None:
        assert markup is not None  # what may be called was offered
        answer = markup.free if form.called is None else markup.forced
    else:
        answer = writer.json("answer", form.schema, strict=form.strict)
        header = "" if formats.reasoning is None else formats.reasoning.header
        answer = f"{writer.markup(header)} {answer}".strip()
        if markup is not None:
            answer = f"({answer} | {markup.forced})"
    grammar = writer.text(f"{before} {answer}".strip())
    notes = [f"{form.origin}: accepted, but not all of it is enforced: {note}" for note in dict.fromkeys(writer.notes)]
    return Constraint(grammar=grammar, origin=form.origin), notes


def invalid_schema(origin: str, error: ConstraintError) -> ApiError:
    """Return the error for a schema that has no grammar; `origin` is the field that it came from."""
    return ApiError(f"'{origin}': {error}.", code="invalid_schema", param=origin)


class _NoGrammar(Exception):
    """Why no grammar can have the calls of a request's tools."""


def _markup(
    writer: GrammarWriter, tools: Sequence[Mapping[str, Any]], form: Form, tool_format: ToolFormat | None
) -> Markup:
    """Return the calls that a request allows. Raises `_NoGrammar`."""
    if tool_format is None:
        raise _NoGrammar("the model has no known format of tool calls")
    offered = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        name, strict = function["name"], function["name"] in form.strict_tools
        if form.called and name not in form.called:
            continue
        if re.fullmatch(tool_format.names, name) is None:
            writer.notes.append(
                f"the tool {short_repr(name)} cannot be called in {tool_format.name} calls: it has no such name"
            )
            continue
        known = form.called is not None or form.schema is not None or strict
        schema = (function.get("parameters") or ANY_OBJECT) if known else None
        offered.append(OfferedTool(number=number, name=name, schema=schema, strict=strict))
    if not offered:
        names = short_repr([tool["function"]["name"] for tool in tools])
        raise _NoGrammar(f"none of the tools {names} has a name that {tool_format.name} calls can have")
    try:
        return tool_format.markup(writer, offered, not form.single)
    except ConstraintError as error:
        raise invalid_schema(form.origin, error) from error


def _before(writer: GrammarWriter, reasoning: ReasoningFormat | None, prompt_text: str) -> str:
    """What may stand before the answer."""
    if reasoning is None:
        return ""
    opened = reasoning.opened_by(prompt_text)
    if reasoning.before is not None:
        return reasoning.before(writer, opened)
    opens, closes = reasoning.opens[0], reasoning.closes[0]
    if prompt_text.rstrip().endswith(closes):
        return ""
    thought = writer.up_to("thought", closes)
    return f"{thought} GAP?" if opened else f"({writer.markup(opens)} {thought} GAP?)?"


def _not_enforced(form: Form, why: str) -> str:
    return f"{form.origin}: accepted, but not enforced: {why}"
