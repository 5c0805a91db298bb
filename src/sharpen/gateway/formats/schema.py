"""Values that a model writes without saying their type: the schema of the tool says it.

In: a text, the tools of the request. Out: the text of a JSON value. The same text and schema always give the same
value; a text that none of the types allows stays a string, which the tool can refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sharpen.gateway.formats.format import ToolCall, Tools
from sharpen.gateway.formats.scan import DECODER, is_name, quoted

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WHOLE = re.compile(r"-?(0|[1-9]\d*)(\.0+)?")
_NULL = ("null", "None")
_BOOLEAN = {"true": "true", "True": "true", "false": "false", "False": "false"}
"""Templates write either JSON's words or Python's (Qwen 3.5)."""
MAX_DEPTH = 16
"""References and combinations of schemas within each other."""


def typed_call(name: str, values: Mapping[str, str], tools: Tools) -> ToolCall | None:
    """Return a call whose arguments have the types that the tool's schema gives them; None for an unusable name."""
    if not is_name(name):
        return None
    schema = _parameters(name, tools)
    properties = schema.get("properties")
    members = []
    for key, text in values.items():
        types = frozenset(types_of(properties.get(key), schema)) if isinstance(properties, dict) else frozenset[str]()
        members.append(f"{quoted(key)}: {json_value(text, types)}")
    return ToolCall(name=name, arguments="{" + ", ".join(members) + "}")


def json_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value that may have these types of JSON Schema; a string if it has none of them."""
    if "null" in types and text in _NULL:
        return "null"
    if "boolean" in types and text in _BOOLEAN:
        return _BOOLEAN[text]
    if ("number" in types and _NUMBER.fullmatch(text)) or ("integer" in types and _WHOLE.fullmatch(text)):
        return text
    if types & {"object", "array"} and _is_one_of(text, types):
        return text
    return quoted(text)


def _is_one_of(text: str, types: frozenset[str]) -> bool:
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return (isinstance(value, dict) and "object" in types) or (isinstance(value, list) and "array" in types)


def _parameters(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield the types that a schema allows, as far as it names them."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    named = schema.get("type")
    yield from (kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))
    if schema.get("nullable") is True:
        yield "null"
    for value in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        yield _type_of(value)
    for combination in ("anyOf", "oneOf", "allOf"):
        for choice in _list(schema.get(combination)):
            yield from types_of(choice, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from types_of(referred(reference, root), root, depth + 1)


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema of `#/$defs/Name`, which is the form that pydantic writes."""
    place: Any = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, dict) else None
    return place


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
