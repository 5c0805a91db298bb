"""What the rules of a tool's arguments share, in formats that do not write them as one JSON object.

In: the schema of a tool's arguments. Out: the schemas behind references and combinations, members in their order, and
a note for each keyword of JSON Schema that no rule holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sharpen.errors import ConstraintError
from sharpen.gateway.formats.grammar import ANY_OBJECT, GrammarWriter, OfferedTool
from sharpen.gateway.formats.schema import MAX_DEPTH, referred

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
