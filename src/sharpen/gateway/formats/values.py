"""Values in a notation that is not JSON, as rules of a grammar: what a tool's schema allows (Gemma's calls, Python's).

In: the schema of a tool's arguments, and a `Notation`. Out: rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.gateway.formats.grammar import GrammarWriter, OfferedTool, literal, one_of
from sharpen.gateway.formats.tool_rules import NUMBER, ToolRules, bounds_of, branches, literals, repetition


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """How a format writes values.

    `string` is the rule of a string whose characters are repeated so often (`*`, or bounds in braces), and `quoted`
    that of one string. `key` is the rule of a member's name and what stands behind it, `any_key` that of any name;
    `is_key` says which names can be written. `words` are the spellings of true, false and null. `by_name`: members
    stand in the order of their names.
    """

    name: str
    string: Callable[[GrammarWriter, str], str]
    quoted: Callable[[GrammarWriter, str], str]
    key: Callable[[str], str]
    any_key: str
    words: Mapping[Any, Sequence[str]]
    comma: str
    is_key: Callable[[str], bool] = lambda _: True
    by_name: bool = False


class ValueRules:
    """The values of one tool's arguments."""

    def __init__(self, writer: GrammarWriter, notation: Notation, tool: OfferedTool) -> None:
        self._rules = ToolRules(writer, notation.name, tool)
        self._writer, self._notation = writer, notation
        self._found: dict[int, str] = {}

    def object(self) -> str:
        """The arguments, as an object."""
        return self._object(None if self._rules.tool.schema is None else self._rules.root)

    def members(self, key: Callable[[str], str], is_key: Callable[[str], bool]) -> str | None:
        """The arguments without braces, their names written by `key` and not as in an object. None if nothing is known
        of them."""
        if self._rules.tool.schema is None:
            return None
        return self._rules.members(
            self._rules.root,
            lambda name, schema: f"{key(name)} {self._value(schema)}",
            is_key=is_key,
            comma=self._notation.comma,
        )

    def any_members(self, key: str) -> str:
        """The members of any object."""
        item = f"{key} {self._any_value()}"
        return f"({item} ({self._notation.comma} {item})*)?"

    def _object(self, schema: Mapping[str, Any] | None) -> str:
        notation = self._notation
        inner = None
        if schema is not None:
            inner = self._rules.members(
                schema,
                lambda name, inner: f"{notation.key(name)} {self._value(inner)}",
                is_key=notation.is_key,
                comma=notation.comma,
                by_name=notation.by_name,
            )
        return f'"{{" {self.any_members(notation.any_key) if inner is None else inner} "}}"'

    def _value(self, schema: Any) -> str:
        """A value. Each place of the schema has one rule, since schemas may refer to themselves."""
        if id(schema) not in self._found:
            name = self._found[id(schema)] = self._rules.name()
            choices = [self._choice(one) for one in branches(schema, self._rules.root)]
            self._writer.add(name, " | ".join(dict.fromkeys(choices)))
        return self._found[id(schema)]

    def _choice(self, schema: Mapping[str, Any]) -> str:
        self._rules.note_unknown(schema)
        if (values := literals(schema)) is not None:
            return one_of([self._literal(value) for value in values])
        match schema.get("type"):
            case "string":
                return self._notation.string(self._writer, repetition(schema) or "*")
            case "boolean":
                return one_of([self._literal(True), self._literal(False)])
            case "null":
                return self._literal(None)
            case "integer" | "number":
                return self._rules.number(schema)
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        return self._any_value()

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items"))
        low, high = bounds_of(schema, "minItems", "maxItems")
        if high == 0:
            return '"[" "]"'
        more = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        items = f"{item} ({self._notation.comma} {item}){more}"
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return self._notation.quoted(self._writer, value)
        if value is None or isinstance(value, bool):
            return one_of([literal(word) for word in self._notation.words[value]])
        if isinstance(value, int | float):
            return literal(json.dumps(value))
        self._rules.note("an 'enum' or 'const' of objects or arrays")
        return self._any_value()

    def _any_value(self) -> str:
        writer, notation = self._writer, self._notation
        name = "any_value"
        if not writer.has(name):
            words = [literal(word) for spelled in notation.words.values() for word in spelled]
            array = f'"[" ({name} ({notation.comma} {name})*)? "]"'
            item = f"{notation.any_key} {name}"
            pairs = f'"{{" ({item} ({notation.comma} {item})*)? "}}"'
            writer.add(name, " | ".join([notation.string(writer, "*"), *words, NUMBER, array, pairs]))
        return name
