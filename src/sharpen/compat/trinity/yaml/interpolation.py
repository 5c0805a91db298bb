"""Interpolations in a Trinity-RFT file: `${oc.env:NAME,default}` and `${section.key}`, as OmegaConf resolves them.

In: the content of a file and an environment. Out: the content with the values in place, and a problem for each
interpolation that has no value. Interpolations may stand within a text, within one another, and may be relative
(`${.key}` is a neighbour, `${..key}` one level further out). Other resolvers are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sharpen.config.explain import Problem

Path = tuple[str | int, ...]
"""Where a value is in the file: names of keys and indices of lists."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUOTED = re.compile(r"""(['"])(.*)\1""", re.DOTALL)
_OPENING = re.compile(r"(\\*)\$\{")
_PART = re.compile(r"\[([^\[\]]+)\]|([^.\[\]]+)")


def interpolate(
    content: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Problem]]:
    """Return the content with every interpolation resolved, and the problems by the dotted key of their value.

    A value with a problem stays the text that it is in the file.
    """
    resolver = _Resolver(content, environment)
    return resolver.value(content, ()), resolver.problems


class _NoValueError(Exception):
    """An interpolation has no value; the message continues "'key' ..."."""


class _Resolver:
    """Resolves the interpolations of one file."""

    def __init__(self, content: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._content = content
        self._environment = environment
        self._open: list[Path] = []  # values that are being resolved, each needed by the one before it
        self.problems: dict[str, Problem] = {}

    def value(self, value: Any, path: Path) -> Any:
        """Resolve all texts of a value. A text without a value stays as it is and becomes a problem."""
        if isinstance(value, Mapping):
            return {name: self.value(inner, (*path, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, (*path, index)) for index, inner in enumerate(value)]
        try:
            return self._scalar(value, path)
        except _NoValueError as error:
            key = _dotted(path)
            self.problems[key] = Problem(place=tuple(key.split(".")), text=str(error))
            return value

    def _scalar(self, value: Any, path: Path) -> Any:
        if not isinstance(value, str) or "${" not in value:
            return value
        if path in self._open:
            raise _NoValueError(f"refers to itself: {value!r}")
        self._open.append(path)
        try:
            return self._text(value, path)
        finally:
            self._open.pop()

    def _text(self, text: str, path: Path) -> Any:
        """Resolve a text. One that is a single interpolation becomes whatever that stands for."""
        parts: list[str] = []
        rest = text
        while opening := _OPENING.search(rest):
            slashes = opening.group(1)
            before = rest[: opening.start()] + "\\" * (len(slashes) // 2)
            if len(slashes) % 2:  # a backslash before it makes it plain text
                parts += [before, "${"]
                rest = rest[opening.end() :]
                continue
            end = _end(rest, opening.end())
            if end is None:
                raise _NoValueError(f"has a '${{' without its '}}': {text!r}")
            value = self._interpolation(rest[opening.end() : end], path)
            rest = rest[end + 1 :]
            if not before and not parts and not rest:
                return value
            parts += [before, str(value)]
        return "".join([*parts, rest])

    def _interpolation(self, expression: str, path: Path) -> Any:
        """The value of what stands between the braces."""
        resolver, colon, arguments = expression.partition(":")
        if "${" in resolver:
            expression = str(self._text(expression, path))
            colon = ""
        if not colon:
            return self._node(expression.strip(), path)
        if resolver.strip() != "oc.env":
            raise _NoValueError(
                f"has the interpolation '${{{expression}}}', which is not read here: ${{oc.env:NAME,default}} and "
                "${section.key} are; write the value itself"
            )
        return self._variable(expression, arguments, path)

    def _variable(self, expression: str, arguments: str, path: Path) -> str | None:
        name, comma, default = (part.strip() for part in arguments.partition(","))
        quoted_name = _QUOTED.fullmatch(name)
        name = quoted_name.group(2) if quoted_name else name
        if not _NAME.fullmatch(name):
            raise _NoValueError(f"has '${{{expression}}}', where {name!r} is no name of an environment variable")
        if name in self._environment:
            return self._environment[name]
        if not comma:
            raise _NoValueError(
                f"needs the environment variable {name}, which is not set: export {name}=..., or write "
                f"${{oc.env:{name},default}}"
            )
        quoted = _QUOTED.fullmatch(default)
        if quoted is None and default == "null":
            return None
        found = self._text(quoted.group(2) if quoted else default, path)
        return None if found is None else str(found)

    def _node(self, expression: str, path: Path) -> Any:
        """The value of another key, resolved where it stands."""
        named = expression.lstrip(".")
        dots = len(expression) - len(named)
        if dots > len(path):
            raise _NoValueError(f"refers to '${{{expression}}}', which is outside of the file")
        found: Any = self._content
        target: Path = ()
        for part in (*(path[:-dots] if dots else ()), *(a or b for a, b in _PART.findall(named))):
            found, part = self._inner(found, target, part, expression)
            target = (*target, part)
        if isinstance(found, Mapping | list):
            if target in self._open or target == path[: len(target)]:
                raise _NoValueError(f"refers to itself: '${{{expression}}}'")
            return self._container(found, target)
        return self._scalar(found, target)

    def _container(self, value: Any, path: Path) -> Any:
        """A section or a list that an interpolation stands for."""
        if isinstance(value, Mapping):
            return {name: self._container(inner, (*path, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._container(inner, (*path, index)) for index, inner in enumerate(value)]
        return self._scalar(value, path)

    def _inner(self, value: Any, path: Path, part: str | int, expression: str) -> tuple[Any, str | int]:
        """One step into a value, which may be an interpolation itself."""
        value = value if isinstance(value, Mapping | list) else self._scalar(value, path)
        if isinstance(value, list) and str(part).isdigit() and int(part) < len(value):
            return value[int(part)], int(part)
        if isinstance(value, Mapping):
            for name in value:
                if str(name) == str(part):
                    return value[name], name
        raise _NoValueError(f"refers to '${{{expression}}}', which the file does not give: write the value itself")


def _dotted(path: Path) -> str:
    """A path as messages have it: `a.b[0].c`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _end(text: str, start: int) -> int | None:
    """Where the brace that is open before `start` closes."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return None
