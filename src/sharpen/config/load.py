"""Resolves a YAML file and keyword arguments into one validated configuration, and records where each value came from.

In: a YAML file, settings, arguments. Out: `ResolvedConfig`. Arguments override settings, settings override the file,
and every override is a line to print. Every problem is a `ConfigError` that names the setting.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from sharpen.config.explain import InvalidConfigError, Place, Problem, explain, settings_of
from sharpen.config.public import DatasetConfig
from sharpen.config.recorded import STARTED
from sharpen.config.run import RunConfig
from sharpen.config.secrets import HIDDEN, fingerprint, hidden_names, hide_in_value, hide_settings, know
from sharpen.errors import ConfigError
from sharpen.files import near_path, write_whole

Origin = str
"""`default`, `chosen`, `run.yaml`, `argument`, or file and key of another layout (`gsm8k.yaml: buffer.batch_size`)."""
CHOSEN = "chosen"
"""The origin of a value that the run chose by itself, to fit the machine."""
Leaves = dict[Place, Any]
_ABSENT = object()
MAX_VALUES = 1_000_000
"""Values of a configuration file, each alias counted with all that it stands for."""
_PARTS: Mapping[Place, tuple[str, ...]] = {
    ("algorithm", "algorithm_type"): ("",),
    ("loss", "advantage"): ("advantage",),
    ("loss", "policy_loss"): ("policy_loss", "dual_clip"),
}
"""The settings that choose an algorithm and its parts, and the prefixes of the loss settings that belong to each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The content of a configuration file as settings of Sharpen; `name` is the file's name.

    `defaults` apply to settings given nowhere else, unless an argument replaces their section. For a file in another
    layout, `origins` maps settings and defaults to their keys in the file, `homes` does so for missing settings, and
    `notices` are lines to print. `evaluate_only` asks for an evaluation instead of training, of the model at `endpoint`
    if there is one (`base_url`, `api_key`, `model_name`).
    """

    settings: Mapping[str, Any]
    name: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[Place, Origin] = field(default_factory=dict)
    homes: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    evaluate_only: bool = False
    endpoint: Mapping[str, str] | None = field(default=None, repr=False)

    def origin(self, place: Place) -> Origin:
        """Return the file's key of the value at `place`, else `run.yaml`."""
        found = (self.origins[place[:n]] for n in range(len(place), 0, -1) if place[:n] in self.origins)
        return next(found, "run.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A run's configuration, the origin of every value (by dotted key), and lines to print: one for each override, and
    the `notices` of a file in another layout. `file` is the file's name, empty without one. `fresh_name` is that of a
    run without a name, known from the beginning on."""

    config: RunConfig
    origins: Mapping[str, Origin]
    overrides: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    evaluate_only: bool = False
    endpoint: Mapping[str, str] | None = field(default=None, repr=False)
    file: str = ""
    fresh_name: str = field(default_factory=lambda: f"Experiment-{datetime.now():%Y%m%d%H%M%S}")

    def choose(self, settings: Mapping[str, Any]) -> ResolvedConfig:
        """Return it with these settings (dotted names), which the run chose by itself."""
        origins = {**self.origins, **dict.fromkeys(settings, CHOSEN)}
        return replace(self, config=self.config.changed(settings), origins=origins)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file. Raises `ConfigError` for a missing file, text that is not YAML (with the line), and a
    duplicate key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}{near_path(path)}") from error
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: its settings are nested too deep to be read") from error
    if content is None:
        return {}
    _check_size(content, path)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} must contain settings as 'name: value' lines, but contains a {type(content).__name__}"
        )
    return content


def _check_size(content: Any, path: Path) -> None:
    """Raise `ConfigError` for settings whose aliases hold themselves, or multiply what they stand for."""
    sizes: dict[int, int | None] = {}

    def size(value: Any) -> int:
        if not isinstance(value, dict | list):
            return 1
        known = sizes.get(id(value), 0)
        if known is None:
            raise ConfigError(f"{path}: an alias holds itself")
        if known:
            return known
        sizes[id(value)] = None
        inner = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = total = 1 + sum(map(size, inner))
        if total > MAX_VALUES:
            raise ConfigError(f"{path}: its aliases stand for more than {MAX_VALUES:,} values: write them out")
        return total

    size(content)


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Turn `["algorithm.group_size=4"]` into `{"algorithm.group_size": 4}`; values are YAML."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"a setting is given as key=value, got {assignment!r}")
        try:
            settings[key.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, RecursionError) as error:
            shown = assignment if len(assignment) <= 200 else f"{assignment[:200]}…"
            raise ConfigError(f"the value of {shown!r} is not YAML") from error
    return settings


def resolve(
    yaml: ConfigFile | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Merge the three sources and validate the result.

    `settings` has nested sections or dotted keys (`{"algorithm.group_size": 4}`). `arguments` has the same form, and
    None means not given. A configuration object overrides only the fields that were set at its construction; a
    `DatasetConfig` replaces the file's whole dataset, because it names other data.

    Raises `ConfigError` with every problem at once.
    """
    file = yaml if isinstance(yaml, ConfigFile) else ConfigFile(settings=yaml or {})
    tree: dict[str, Any] = _plain(file.settings)
    given: dict[Place, Origin] = {place: file.origin(place) for place in _leaves(tree)}
    overrides: list[str] = []
    given_arguments = {name: value for name, value in (arguments or {}).items() if value is not None}
    for source in (_nested(settings or {}), _nested(given_arguments)):
        before = _leaves(tree)
        _merge(tree, source)
        after = _leaves(tree)
        overrides += _override_lines(before, after, given)
        given = {place: given[place] if before.get(place, _ABSENT) == after[place] else "argument" for place in after}
    given |= _add_defaults(
        tree, file, {name for name, value in given_arguments.items() if isinstance(value, BaseModel)}
    )
    _refuse_hidden(tree)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = [_at_home(problem, file, given) for problem in explain(RunConfig, error)]
        raise InvalidConfigError.of("the configuration is not valid", problems) from None
    know_secrets(config)
    origins: dict[str, Origin] = {
        ".".join(place): next((given[place[:n]] for n in range(len(place), 0, -1) if place[:n] in given), "default")
        for place in value_leaves(config)
    }
    return ResolvedConfig(
        config=config,
        origins=origins,
        overrides=tuple(overrides),
        notices=file.notices,
        evaluate_only=file.evaluate_only,
        endpoint=file.endpoint,
        file=file.name,
    )


def _add_defaults(tree: dict[str, Any], file: ConfigFile, replaced: set[str]) -> dict[Place, Origin]:
    """Add the file's defaults for settings that are not given, and return the origin of each added default. Defaults of
    an algorithm's parts do not apply once an argument has changed the algorithm or the part."""
    added: dict[Place, Origin] = {}
    there, before = _leaves(tree), _leaves(file.settings)
    changed = {place for place in _PARTS if there.get(place) != before.get(place)}
    for place, value in _leaves(file.defaults).items():
        outdated = any(place[:1] == ("loss",) and place[1].startswith(_PARTS[part]) for part in changed)
        if place not in there and place[0] not in replaced and not outdated:
            section = tree
            for name in place[:-1]:
                section = section.setdefault(name, {})
            section[place[-1]] = value
            added[place] = file.origin(place)
    return added


def _at_home(problem: Problem, file: ConfigFile, given: Mapping[Place, Origin]) -> Problem:
    """Add the setting's key in a file of another layout to a problem."""
    if not file.origins:
        return problem
    home = given.get(problem.place) or file.homes.get(".".join(problem.place))
    text = problem.text if home in (None, "argument") else f"{problem.text} ({home})"
    return Problem(place=problem.place, text=text, unknown=problem.unknown)


def value_problems(file: ConfigFile) -> Iterator[tuple[str, Problem]]:
    """Yield the problems of the values in a file of another layout, each with the file's key. Missing settings are not
    reported, since an argument may give them."""
    tree = _plain(file.defaults)
    _merge(tree, file.settings)
    try:
        RunConfig.model_validate(tree)
    except ValidationError as error:
        for problem in explain(RunConfig, error):
            if problem.place in file.origins:
                key = file.origins[problem.place]
                yield key.removeprefix(f"{file.name}: "), _at_home(problem, file, file.origins)


def _refuse_hidden(tree: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if settings come from a run's folder, where their secrets are hidden."""
    if names := hidden_names(tree):
        raise ConfigError(
            f"{', '.join(names)}: the value is {HIDDEN}, which stands in a run's folder in place of a secret: write "
            "the secret there again (better: have it in the environment)"
        )


def write_config(source: Path, target: Path) -> None:
    """Copy a configuration file into a run's folder. If it has secrets, they are hidden, and its comments are lost."""
    content = read_yaml(source)
    shown = hide_settings(content)
    if shown == content:
        write_whole(target, source.read_bytes())
    else:
        write_given(shown, target)


def write_given(settings: Mapping[str, Any], target: Path) -> None:
    """Write settings as `config.yaml`, with their secrets hidden."""
    text = yaml.safe_dump(hide_settings(settings), sort_keys=False, allow_unicode=True)
    head = f"# {HIDDEN} stands for a secret.\n" if HIDDEN in text else ""
    write_whole(target, f"{head}{text}".encode())


def write_resolved(path: Path, resolved: ResolvedConfig, derived: Mapping[str, Any] | None = None) -> None:
    """Write every value and its origin; secrets are hidden, and a fingerprint stands beside them. `derived` adds values
    that the run determined itself. The moment is one of them: `STARTED`, in seconds since 1970."""
    entries = {
        name: {"value": value, "origin": resolved.origins[name]}
        for name, value in shown_settings(resolved.config).items()
    }
    for name, value in hidden_values(resolved.config).items():
        entries[name]["fingerprint"] = fingerprint(value)
    found = {**(derived or {}), STARTED: round(time.time(), 3)}
    entries |= {name: {"value": value, "origin": "derived"} for name, value in found.items()}
    write_whole(path, f"{json.dumps(entries, indent=2, ensure_ascii=False, sort_keys=True)}\n")


def know_secrets(config: RunConfig) -> None:
    """Have the secrets of a configuration hidden in the texts that this process writes."""
    for place, value in value_leaves(config).items():
        know(_within(place[:-1], {place[-1]: value}), by_name=not _is_own(place))


def shown_settings(config: RunConfig) -> dict[str, Any]:
    """Return every value by its dotted name, as it may be written and shown: with secrets hidden."""
    return {".".join(place): shown(place, value) for place, value in value_leaves(config).items()}


def hidden_values(config: RunConfig) -> dict[str, Any]:
    """Return the values in which something is hidden when they are shown, as they are."""
    return {".".join(place): value for place, value in value_leaves(config).items() if shown(place, value) != value}


def shown(place: Place, value: Any) -> Any:
    """Return the value of a setting with the secrets in it hidden. What a setting of ours is called makes no secret of
    it; the names within `workflow_args` and the like do."""
    if _is_own(place):
        return hide_in_value(value) if isinstance(value, str) else value
    *sections, name = place
    tree = hide_settings(_within(sections, {name: value}))
    for section in sections:
        tree = tree[section]
    return tree[name]


def _within(sections: Sequence[str], tree: dict[str, Any]) -> dict[str, Any]:
    for section in reversed(sections):
        tree = {section: tree}
    return tree


@functools.cache
def _is_own(place: Place) -> bool:
    """Whether a place is that of a setting of ours, not one within a setting that holds any names."""
    return any(all(map(fnmatchcase, place, own)) for own in _own_settings() if len(own) == len(place))


@functools.cache
def _own_settings() -> tuple[Place, ...]:
    return tuple(settings_of(RunConfig))


def value_leaves(config: RunConfig) -> Leaves:
    """Return every value of a configuration by its place. A missing optional section is the single value None."""
    return _leaves(config.model_dump(mode="json"))


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, which in addition refuses duplicate keys in a section and reads `1e-6` as a number, as YAML 1.2
    does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"'{key}' is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


_CODE: tuple[Place, ...] = (
    *(("workflow",), ("judge",), ("evaluation", "own", "*", "workflow"), ("monitor_type",)),
    *(("engine", "type"), ("environment", "type")),
    *(("model", "tool_call_parser"), ("model", "reasoning_parser")),
    *(("auxiliary_models", "*", "tool_call_parser"), ("auxiliary_models", "*", "reasoning_parser")),
    *(("sampling", "operators", "*", "name"), ("sampling", "task_operators", "*", "name")),
    *(("algorithm", "algorithm_type"), ("loss", "advantage"), ("loss", "policy_loss")),
    *(("loss", "kl"), ("loss", "aggregation")),
)
"""The settings that say where code is."""


_PATHS = ("path", "model_path", "teacher_path", "marks")
"""The last names of the settings that say where data and models are."""


def point_beside(content: Mapping[str, Any], folder: Path) -> None:
    """Make relative paths of datasets, models and code files that exist in `folder` point there. Changes `content`."""
    places = [(place, False) for place in settings_of(RunConfig) if place[-1] in _PATHS]
    places += [(("sampling", name, "*", "args", "config_path"), False) for name in ("operators", "task_operators")]
    places += [
        (("distill", "teachers", name), False) for some in _sections(content, ("distill", "teachers")) for name in some
    ]
    for place, code in [*places, *((code, True) for code in _CODE)]:
        for section in _sections(content, place[:-1]):
            value = section.get(place[-1])
            if (
                not isinstance(value, str) or section.get("base_url") is not None
            ):  # an endpoint's model name, not a folder
                continue
            has_place = code or (place[-1] == "path" and not (folder / value).exists())
            name, colon, function = value.rpartition(":") if has_place else (value, "", "")
            if name and (folder / name).exists():
                section[place[-1]] = f"{folder / name}{colon}{function}"


def _sections(content: Any, path: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the sections at `path`, where `*` stands for any key, or any item of a list."""
    if path[:1] == ("*",) and isinstance(content, dict | list):
        for inner in content.values() if isinstance(content, dict) else content:
            yield from _sections(inner, path[1:])
    elif not isinstance(content, dict):
        return
    elif not path:
        yield content
    elif path[0] in content:
        yield from _sections(content[path[0]], path[1:])


def _plain(value: Any) -> Any:
    """Return a configuration object as a mapping of the fields that were set. Mappings are copied, so merging is
    safe."""
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
        before_shown = shown(place, value)
        if now is _ABSENT:
            yield f"override: {name} = {before_shown!r} ({source}) does not apply: an argument replaces its section"
        elif now != value:
            yield f"override: {name} = {shown(place, now)!r} (argument) instead of {before_shown!r} ({source})"
