"""The rules of a tool's arguments as a grammar, in formats that do not write them as one JSON object.

In: the schema of a tool's arguments, and how a format writes them: as elements, one for each, whose values stand as
they are and without their type (GLM, Qwen3-Coder), or as values in a `Notation` of its own (Gemma's calls, Python's).
Out: rules, and a note for each keyword of JSON Schema that no rule holds. Elements give what `schema.typed_call` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.errors import ConstraintError
from sharpen.gateway.formats.grammar import ANY, ANY_OBJECT, GrammarWriter, OfferedTool, literal, one_of
from sharpen.gateway.formats.schema import MAX_DEPTH, json_value, referred, types_of

_KNOWN = frozenset(
    {
        *("type", "nullable", "enum", "const", "anyOf", "oneOf", "allOf", "properties", "required", "items"),
        *("additionalProperties", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum", "title", "description", "default", "examples", "deprecated", "$defs"),
        *("definitions", "$schema", "$id", "$comment", "readOnly", "writeOnly", "discriminator"),
    }
)
_TYPES = ("string", "boolean", "null", "integer", "number", "array", "object")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAX_REPEATED = 10_000
"""Larger bounds of lengths have no effect: they make grammars that are too large."""
INTEGER = r"/-?(0|[1-9][0-9]{0,17})/"
NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"
"""Numbers, as far as every reader can hold them."""


class ToolRules:
    """Adds the rules of one tool."""

    def __init__(self, writer: GrammarWriter, format_name: str, tool: OfferedTool) -> None:
        self.writer, self.tool = writer, tool
        self.root: Mapping[str, Any] = tool.schema or ANY_OBJECT
        self._format_name = format_name
        self._count = 0

    def add(self, rule: str) -> str:
        """Add a rule with a name of its own."""
        return self.writer.add(self.name(), rule)

    def name(self) -> str:
        self._count += 1
        return f"value_{self.tool.number}_{self._count}"

    def note(self, what: str) -> None:
        self.writer.notes.append(f"the tool {self.tool.name!r}: {what} is not enforced in {self._format_name} calls")

    def note_unknown(self, schema: Mapping[str, Any]) -> None:
        """Note what a schema asks and no rule holds. Raises `ConstraintError` for what is no schema."""
        for key in sorted(set(schema) - _KNOWN - {"$ref"}):
            self.note(f"{key!r} in its schema")
        kinds = items_of(schema.get("type")) or [schema.get("type")]
        if any(kind is not None and kind not in _TYPES for kind in kinds):
            raise ConstraintError(f"the schema of the tool {self.tool.name!r} has the type {schema['type']!r}")
        if "$ref" in schema:
            raise ConstraintError(f"the schema of the tool {self.tool.name!r} refers to nothing: {schema['$ref']!r}")
        if len(items_of(schema.get("allOf"))) > 1:
            self.note("'allOf' of several schemas")

    def number(self, schema: Mapping[str, Any]) -> str:
        """A number of a schema with the type "integer" or "number"."""
        kind = schema["type"]
        if bounds := {key: schema[key] for key in _BOUNDS if key in schema}:
            return self.writer.json(self.name(), {"type": kind, **bounds}, strict=self.tool.strict)
        return INTEGER if kind == "integer" else NUMBER

    def members(
        self,
        schema: Mapping[str, Any],
        member: Callable[[str, Any], str],
        *,
        is_key: Callable[[str], bool],
        comma: str = "",
        by_name: bool = False,
    ) -> str | None:
        """The members of an object, each by `member` of its name and schema, in the order of the schema or of their
        names. Return None for an object of which no members are known, but which may have some.

        Names that are no keys of the format are left out.
        """
        schema = plain(schema, self.root)
        self.note_unknown(schema)
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            return '""' if schema.get("additionalProperties") is False else None
        required = items_of(schema.get("required"))
        items = []
        for name in sorted(properties, key=str.lower) if by_name else properties:
            if is_key(name):
                items.append((self.add(member(name, properties[name])), name in required))
            elif name in required:
                self.note(f"the required property {name!r}, which such calls cannot name,")
        return self._in_order(items, comma)

    def _in_order(self, items: Sequence[tuple[str, bool]], comma: str) -> str:
        """Members in their order, with commas between those that are there; each with whether it must be there."""
        after = begins = self.add('""')
        for name, needed in reversed(items):
            begins = self.add(f"{name} {after}" if needed else f"{name} {after} | {begins}")
            after = self.add(f"{comma} {name} {after}" if needed else f"({comma} {name})? {after}")
        return begins


def plain(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a schema refers to, through all references and through an `allOf` of one. A reference to no schema
    stays as it is."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict):
            return {}
        if isinstance(reference := schema.get("$ref"), str):
            if not isinstance(target := referred(reference, root), dict):
                return schema
            schema = target
        elif len(one := items_of(schema.get("allOf"))) == 1:
            schema = {**{key: value for key, value in schema.items() if key != "allOf"}, **plain(one[0], root)}
        else:
            return schema
    return {}


def branches(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas, each of one type at most, of which a value has to have one."""
    schema = plain(schema, root)
    choices = [*items_of(schema.get("anyOf")), *items_of(schema.get("oneOf"))]
    if schema.get("nullable") is True:
        yield {"type": "null"}
    if choices and depth < MAX_DEPTH:
        for choice in choices:
            yield from branches(choice, root, depth + 1)
    elif isinstance(schema.get("type"), list) and literals(schema) is None:
        for kind in schema["type"]:
            yield {**schema, "type": kind}
    else:
        yield schema


def literals(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None if it does not."""
    if "const" in schema:
        return [schema["const"]]
    return items_of(schema.get("enum")) or None


def repetition(schema: Mapping[str, Any]) -> str | None:
    """Return how often a string's character may be repeated; None if as often as wanted."""
    low, high = bounds_of(schema, "minLength", "maxLength")
    return None if low == 0 and high is None else f"{{{low},{'' if high is None else high}}}"


def bounds_of(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """Return the least and the largest number, None for any, that two keywords of a schema say."""
    low, high = schema.get(least), schema.get(most)
    return (
        low if type(low) is int and 0 < low <= _MAX_REPEATED else 0,
        high if type(high) is int and 0 <= high <= _MAX_REPEATED else None,
    )


def items_of(value: Any) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return value if isinstance(value, list) else []


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
