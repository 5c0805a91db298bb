"""What a request asks of the form of its answer, as a grammar for the engine.

In: the fields of a request (`response_format`, `tool_choice`, `strict` tools, or what other protocols call them), and
the formats in which the model writes. Out: a `Constraint`, which is recorded with the call. The grammar covers the
whole response: reasoning comes first, unconstrained up to the text that closes it, if the prompt leaves room for it.

JSON has no whitespace but one space or newline after a comma and a space after a colon, so that no answer can consist
of whitespace. Schemas that are not strict may use keywords that llguidance does not know, which then have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sharpen.gateway.formats.format import ReasoningFormat
from sharpen.gateway.formats.hermes import CLOSE, HERMES, OPEN
from sharpen.gateway.formats.table import Formats
from sharpen.gateway.formats.think import DEEPSEEK_R1, QWEN3
from sharpen.gateway.requests import ApiError, CallRequest, Form, boolean, short_repr
from sharpen.types import Constraint

TokenId = Callable[[str], int | None]
"""Returns the id of a token with this text that was added to the tokenizer, if there is one."""

_JSON = {"whitespace_flexible": False, "item_separator": ",[ \n]?", "key_separator": ": ?"}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_TEXT = r"TEXT: /(.|\n)*/"
_GAP = r"GAP: /\n{1,2}/"


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


def schema_of(form: Any, name: str) -> tuple[Mapping[str, Any] | None, bool]:
    """Return the schema that OpenAI's `response_format` or `text.format` asks for, None for any text, and whether it is
    strict. In the first it is one level deeper. Raises `ApiError`."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None, False
    if kind == "json_object":
        return _ANY_OBJECT, False
    if kind != "json_schema":
        raise ApiError(
            f"'{name}.type' is {short_repr(kind)}; it must be 'text', 'json_object' or 'json_schema'.", param=name
        )
    about = form.get("json_schema", form)
    if not isinstance(about, dict) or not isinstance(about.get("schema"), dict):
        raise ApiError(f"'{name}' of type 'json_schema' needs an object 'schema'.", param=name)
    return about["schema"], boolean(about, "strict")


def not_enforced(request: CallRequest, formats: Formats) -> str | None:
    """Return a warning if the request wants tool calls that cannot be enforced: in the model's format, or after the
    beginning of an answer."""
    form = request.form
    if form is None or form.schema is not None or formats.tool is None:
        return None
    if request.continue_final:
        return f"{form.origin}: accepted, but not enforced in answers whose beginning is given"
    if formats.tool is HERMES:
        return None
    return f"{form.origin}: accepted, but not enforced: there is no grammar for the tool calls of {formats.tool.name}"


def constraint_of(request: CallRequest, prompt_text: str, formats: Formats, token_id: TokenId) -> Constraint | None:
    """Return the constraint of a request's answer; None without one. Raises `ApiError` if the answer's schema cannot be
    combined with what else the request or the model's format asks."""
    form = request.form
    if form is None or (form.schema is None and (formats.tool is not HERMES or request.continue_final)):
        return None
    if request.continue_final:
        raise ApiError(f"'{form.origin}' cannot constrain an answer whose beginning is given.", param=form.origin)
    if form.schema is not None and request.tools and formats.tool is not HERMES:
        raise ApiError(
            f"'{form.origin}' with tools: this model's format of tool calls has no grammar; send one of the two.",
            param=form.origin,
        )
    writer = _Writer(token_id)
    thinking = writer.thinking(formats.reasoning, prompt_text, form.origin)
    if form.called is not None:
        answer = writer.forced(request.tools, form)
    elif form.schema is None:
        answer = writer.free(request.tools, form)
    else:
        answer = writer.json("answer", form.schema, strict=form.strict)
        if request.tools:
            answer = f"({answer} | {writer.forced(request.tools, form)})"
    return Constraint(grammar=writer.grammar(f"{thinking} {answer}".strip()), origin=form.origin)


class _Writer:
    """Collects the rules of a grammar. Each method adds some, and returns what stands for them in another rule."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, _TEXT, _GAP, ""])

    def add(self, name: str, rule: str, attributes: str = "") -> str:
        self._rules.append(f"{name}{attributes}: {rule}")
        return name

    def json(self, name: str, schema: Mapping[str, Any], *, strict: bool) -> str:
        options = {**_JSON, "lenient": not strict}
        return self.add(name, f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def tag(self, text: str) -> str:
        """A text, which may be one of the tokenizer's own tokens."""
        token = self._token_id(text)
        return _quoted(text) if token is None else f"({_quoted(text)} | <[{token}]>)"

    def up_to(self, name: str, text: str) -> str:
        """Any text up to and including `text`."""
        pattern = text.replace("/", r"\/")
        found = self.add(f"{name}_text", rf"/(.|\n)*{pattern}/", "[lazy]")
        token = self._token_id(text)
        return self.add(name, found if token is None else f"{found} | TEXT <[{token}]>")

    def thinking(self, reasoning: ReasoningFormat | None, prompt_text: str, origin: str) -> str:
        """What comes before the answer."""
        if reasoning is None:
            return ""
        if reasoning not in (QWEN3, DEEPSEEK_R1):
            raise ApiError(
                f"'{origin}': answers in this model's format of reasoning ({reasoning.name}) cannot be constrained.",
                param=origin,
            )
        opens, closes = reasoning.opens[0], reasoning.closes[0]
        if prompt_text.rstrip().endswith(closes):
            return ""
        thought = self.up_to("thought", closes)
        return f"{thought} GAP?" if reasoning.opened_by(prompt_text) else f"({self.tag(opens)} {thought} GAP?)?"

    def call(self, tools: Sequence[Mapping[str, Any]], form: Form, *, forced: bool) -> str:
        """What follows the opening tag: one of the tools' calls, and the closing tag."""
        bodies = []
        for number, tool in enumerate(tools):
            function = tool["function"]
            if form.called and function["name"] not in form.called:
                continue
            strict = function["name"] in form.strict_tools
            schema = function.get("parameters") if forced or strict else None
            arguments = self.json(f"arguments_{number}", schema or _ANY_OBJECT, strict=strict)
            name = _quoted(_quoted(function["name"]))
            bodies.append(rf'{name} "," " "? "\"arguments\":" " "? {arguments}')
        body = self.add("body", " | ".join(bodies))
        return self.add("call", rf'"\n"? "{{\"name\":" " "? {body} "}}" "\n"? {self.tag(CLOSE)}')

    def forced(self, tools: Sequence[Mapping[str, Any]], form: Form) -> str:
        """Nothing but calls."""
        call, opens = self.call(tools, form, forced=True), self.tag(OPEN)
        return f"{opens} {call}" if form.single else rf'{opens} {call} ("\n"? {opens} {call})*'

    def free(self, tools: Sequence[Mapping[str, Any]], form: Form) -> str:
        """Any text, in which each opening tag begins a call."""
        return f"({self.up_to('opened', OPEN)} {self.call(tools, form, forced=False)})* TEXT"


def _quoted(text: str) -> str:
    """A text as a literal of JSON, and of grammars."""
    return json.dumps(text, ensure_ascii=False)
