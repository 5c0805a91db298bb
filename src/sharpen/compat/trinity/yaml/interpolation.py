"""`${oc.env:NAME,default}` in a Trinity-RFT file.

In: the content of a file, an environment. Out: the same content with the variables' values in place. Defaults may hold
further interpolations; other kinds of interpolation are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sharpen.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUOTED = re.compile(r"""(['"])(.*)\1""", re.DOTALL)


def interpolate(content: Any, environment: Mapping[str, str], file: str, key: str = "") -> Any:
    """Resolve every string of `content`. Raises `ConfigError`, which names the file and the key."""
    if isinstance(content, Mapping):
        return {
            name: interpolate(value, environment, file, f"{key}.{name}" if key else str(name))
            for name, value in content.items()
        }
    if isinstance(content, list):
        return [interpolate(value, environment, file, f"{key}[{i}]") for i, value in enumerate(content)]
    if isinstance(content, str) and "${" in content:
        return _resolve(content, environment, f"{file}: '{key}'")
    return content


def _resolve(text: str, environment: Mapping[str, str], where: str) -> Any:
    """All interpolations of a string; a string that is one interpolation may become null."""
    parts: list[str] = []
    rest = text
    while "${" in rest:
        before, _, opened = rest.partition("${")
        end = _end(opened)
        if end is None:
            raise ConfigError(f"{where} has a '${{' without its '}}': {text!r}")
        value = _variable(opened[:end], environment, where)
        rest = opened[end + 1 :]
        if not before and not parts and not rest:
            return value
        parts += [before, "" if value is None else value]
    return "".join([*parts, rest])


def _end(text: str) -> int | None:
    """Where the brace that is open before `text` closes."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return index
    return None


def _variable(expression: str, environment: Mapping[str, str], where: str) -> str | None:
    kind, colon, arguments = expression.partition(":")
    if not colon or kind.strip() != "oc.env":
        raise ConfigError(
            f"{where} has the interpolation '${{{expression}}}', which is not read here: only ${{oc.env:NAME,default}} "
            "is; write the value itself"
        )
    name, comma, default = (part.strip() for part in arguments.partition(","))
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where} has '${{{expression}}}', where {name!r} is no name of an environment variable")
    if name in environment:
        return environment[name]
    if not comma:
        raise ConfigError(
            f"{where} needs the environment variable {name}, which is not set: export {name}=..., or write "
            f"${{oc.env:{name},default}}"
        )
    quoted = _QUOTED.fullmatch(default)
    if quoted is None and default == "null":
        return None
    found = _resolve(quoted.group(2) if quoted else default, environment, where)
    return None if found is None else str(found)
