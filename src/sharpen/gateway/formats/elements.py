"""Arguments as elements, one for each, whose values stand as they are and without their type: rules of a grammar.

In: the schema of a tool's arguments, and how a format writes an element. Out: rules of texts that `schema.typed_call`
reads as arguments of that schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sharpen.gateway.formats.grammar import ANY, GrammarWriter, OfferedTool, literal, one_of
from sharpen.gateway.formats.schema import json_value, types_of
from sharpen.gateway.formats.tool_rules import ToolRules, branches, literals, repetition

_NOT_JSON = rf"[ \t\n\r]*[{{\[]{ANY}*"
_WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """How an argument is written: `opens` writes what stands before the value, `any_opens` is a rule of it for any
    name; `lead` and `closes` end the value, and `after`, a rule, may follow."""

    name: str
    opens: Callable[[GrammarWriter, str], str]
    any_opens: str
    is_key: Callable[[str], bool]
    closes: str
    lead: str = ""
    after: str = ""


def element_rules(writer: GrammarWriter, element: Element, tool: OfferedTool) -> str:
    """Return the elements of a tool's arguments."""
    rules = _Elements(writer, element, tool)
    known = None if tool.schema is None else rules.known()
    return rules.any() if known is None else known


class _Elements:
    def __init__(self, writer: GrammarWriter, element: Element, tool: OfferedTool) -> None:
        self._writer, self._element = writer, element
        self._rules = ToolRules(writer, element.name, tool)

    def known(self) -> str | None:
        return self._rules.members(self._rules.root, self._member, is_key=self._element.is_key)

    def any(self) -> str:
        """Any arguments. That no name stands there twice is not enforced."""
        name = "any_element"
        if not self._writer.has(name):
            text = self._writer.up_to("any_argument", self._element.closes, lead=self._element.lead)
            self._writer.add(name, f"{self._element.any_opens} {text} {self._element.after}")
        return f"{name}*"

    def _member(self, name: str, schema: Any) -> str:
        return f"{self._element.opens(self._writer, name)} {self._value(schema)} {self._element.after}"

    def _value(self, schema: Any) -> str:
        """A value and the end of its element."""
        types = frozenset(types_of(schema, self._rules.root))
        choices = list(branches(schema, self._rules.root))
        for choice in choices:
            if choice.get("type") not in ("object", "array"):  # of these llguidance knows more
                self._rules.note_unknown(choice)
        listed = [self._json(one) for one in choices if one.get("type") in ("object", "array")]
        if not types or any(one.get("type", "string") == "string" and literals(one) is None for one in choices):
            times = repetition(choices[0]) if types == {"string"} and len(choices) == 1 else None
            text = self._text(times or "*", _NOT_JSON if listed else None)
            return one_of([text, *([self._closed(listed)] if listed else [])])
        return self._closed([word for one in choices for word in self._spellings(one, types)] + listed)

    def _spellings(self, schema: Mapping[str, Any], types: frozenset[str]) -> list[str]:
        """The values of a schema that is neither of any string nor of an object or list."""
        kind = schema.get("type")
        if (values := literals(schema)) is not None:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            pairs = zip(texts, values, strict=True)
            return [literal(text) for text, value in pairs if json.loads(json_value(text, types)) == value]
        if kind in ("integer", "number"):
            return [self._rules.number(schema)]
        return [literal(word) for word in _WORDS.get(str(kind), ())]

    def _closed(self, choices: list[str]) -> str:
        if not choices:
            self._rules.note("a property of which no value can be written")
            return self._text("*")
        element = self._element
        lead = literal(element.lead) if element.lead else ""
        return f"({' | '.join(choices)}) {lead} {self._writer.markup(element.closes)}"

    def _text(self, times: str, without: str | None = None) -> str:
        """Any text so long, and the end of its element."""
        element, name = self._element, self._rules.name()
        return self._writer.up_to(name, element.closes, f"{ANY}{times}", lead=element.lead, without=without)

    def _json(self, schema: Mapping[str, Any]) -> str:
        definitions = {key: self._rules.root[key] for key in _DEFINITIONS if key in self._rules.root}
        return self._writer.json(self._rules.name(), {**definitions, **schema}, strict=self._rules.tool.strict)
