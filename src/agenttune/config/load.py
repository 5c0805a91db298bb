"""From a YAML file and keyword arguments to one validated configuration, and where each of its values came from.

In: a YAML file, settings, arguments. Out: `Resolved`. Arguments override settings, settings override the file, and
every override is a line to print. Every problem is a `ConfigError` that names the setting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError

from agenttune.config.explain import InvalidConfigError, Place, explain, settings_of
from agenttune.config.public import DatasetConfig
from agenttune.config.run import RunConfig
from agenttune.errors import ConfigError

Origin = Literal["default", "run.yaml", "argument"]
Leaves = dict[Place, Any]
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A run's configuration, the origin of every value (by dotted key), and one printable line for each override."""

    config: RunConfig
    origins: Mapping[str, Origin]
    overrides: tuple[str, ...] = ()


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a configuration file. Relative paths of datasets, models and code files that exist beside it point there.

    Raises `ConfigError` for a missing file, text that is not YAML (with the line), and a key that comes twice.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold settings as 'name: value' lines, but holds a {type(content).__name__}")
    _point_beside(content, path.parent)
    return content


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Turn `["algorithm.group_size=4"]` into `{"algorithm.group_size": 4}`; values are YAML."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"a setting is given as key=value, but {assignment!r} came")
        try:
            settings[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"the value of {assignment!r} is not YAML") from error
    return settings


def resolve(
    yaml: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge the three sources and validate the result.

    `settings` has nested sections or dotted keys (`{"algorithm.group_size": 4}`). `arguments` has the same form, and
    a value of None means not given. A configuration object overrides the fields that were set when it was
    made; a `DatasetConfig` replaces the file's dataset whole, because it names other data.

    Raises `ConfigError` with every problem at once.
    """
    tree: dict[str, Any] = _plain(yaml or {})
    given: dict[Place, Origin] = dict.fromkeys(_leaves(tree), "run.yaml")
    overrides: list[str] = []
    given_arguments = {name: value for name, value in (arguments or {}).items() if value is not None}
    for source in (_nested(settings or {}), _nested(given_arguments)):
        before = _leaves(tree)
        _merge(tree, source)
        after = _leaves(tree)
        overrides += _override_lines(before, after, given)
        given = {place: given[place] if before.get(place, _ABSENT) == after[place] else "argument" for place in after}
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise InvalidConfigError.of("the configuration is not valid", explain(RunConfig, error)) from None
    origins: dict[str, Origin] = {
        ".".join(place): next((given[place[:n]] for n in range(len(place), 0, -1) if place[:n] in given), "default")
        for place in value_leaves(config)
    }
    return Resolved(config=config, origins=origins, overrides=tuple(overrides))


def write_resolved(path: Path, resolved: Resolved, derived: Mapping[str, Any] | None = None) -> None:
    """Write every value and where it came from; `derived` adds values that the run worked out (device)."""
    entries = {
        ".".join(place): {"value": value, "origin": resolved.origins[".".join(place)]}
        for place, value in value_leaves(resolved.config).items()
    }
    entries |= {name: {"value": value, "origin": "derived"} for name, value in (derived or {}).items()}
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(entries, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def value_leaves(config: RunConfig) -> Leaves:
    """Every value of a configuration by its place; an absent optional section is one value, None."""
    return _leaves(config.model_dump(mode="json"))


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, with an error instead of silence where a key comes twice in one section."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"'{key}' is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _point_beside(content: dict[str, Any], folder: Path) -> None:
    places = [(place, False) for place in settings_of(RunConfig) if place[-1] in ("path", "model_path")]
    for place, code in [*places, (("workflow",), True), (("judge",), True)]:
        for section in _sections(content, place[:-1]):
            value = section.get(place[-1])
            if not isinstance(value, str):
                continue
            name, colon, function = value.rpartition(":") if code else (value, "", "")
            if name and (folder / name).exists():
                section[place[-1]] = f"{folder / name}{colon}{function}"


def _sections(content: Any, path: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The sections at `path`, where `*` stands for any key."""
    if not isinstance(content, dict):
        return
    if not path:
        yield content
    elif path[0] == "*":
        for inner in content.values():
            yield from _sections(inner, path[1:])
    elif path[0] in content:
        yield from _sections(content[path[0]], path[1:])


def _plain(value: Any) -> Any:
    """Configuration objects as mappings of the fields that were set; mappings are copied, so that merging is safe."""
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return value


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        name, _, rest = str(key).partition(".")
        if rest:
            _merge(tree, {name: _nested({rest: value})})
        elif isinstance(value, Mapping):
            _merge(tree, {name: value})
        else:
            tree[name] = value
    return tree


def _merge(tree: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, DatasetConfig) or not isinstance(value, Mapping | BaseModel):
            tree[key] = _plain(value)
            continue
        inner = tree.get(key)
        if not isinstance(inner, dict):
            inner = tree[key] = {}
        _merge(inner, _fields(value))


def _fields(value: Mapping[str, Any] | BaseModel) -> Mapping[str, Any]:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}
    return value


def _leaves(tree: Any, within: tuple[str, ...] = ()) -> Leaves:
    if not isinstance(tree, Mapping):
        return {within: tree}
    leaves: Leaves = {}
    for key, value in tree.items():
        leaves |= _leaves(value, (*within, str(key)))
    return leaves


def _override_lines(before: Leaves, after: Leaves, given: Mapping[Place, Origin]) -> Iterator[str]:
    for place, value in before.items():
        name, source = ".".join(place), given[place]
        now = after.get(place, _ABSENT)
        if now is _ABSENT:
            yield f"override: {name} = {value!r} ({source}) does not apply: an argument replaces its section"
        elif now != value:
            yield f"override: {name} = {now!r} (argument) instead of {value!r} ({source})"
