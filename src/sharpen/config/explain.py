"""What is wrong with a configuration, in sentences for its owner.

In: a pydantic `ValidationError` and the class it came from. Out: an `InvalidConfigError` that names, for every problem
at once, the setting, the value that came, and what is allowed; an unknown setting comes with the nearest valid name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from sharpen.errors import ConfigError

Place = tuple[str, ...]
"""Where a setting is, from the outermost section inwards."""

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "model": "a section of settings",
    "mapping": "a section of settings",
    "dict": "a section of settings",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong: where, and a predicate that continues "'a.b' ..."."""

    place: Place
    text: str
    unknown: bool = False

    def __str__(self) -> str:
        return f"'{'.'.join(self.place)}' {self.text}" if self.place else self.text


class InvalidConfigError(ConfigError):
    """Settings that are unknown, missing, or have values that are not allowed; `problems` holds each."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, what: str, problems: Sequence[Problem]) -> InvalidConfigError:
        """Build the message: one line for one problem, else a line for each below the first."""
        if len(problems) == 1:
            return cls(f"{what}: {problems[0]}", problems)
        return cls(
            "\n".join([f"{what}: {len(problems)} problems", *(f"  - {problem}" for problem in problems)]), problems
        )


def explain(model: type[BaseModel], error: ValidationError) -> list[Problem]:
    """Translate each of pydantic's errors, with places as `model` sees them."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        place = tuple(str(part) for part in item["loc"] if part != "[key]")
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, InvalidConfigError):  # raised by the constructor of a section within
            problems += [_lifted(model, place, inner) for inner in cause.problems]
        else:
            unknown = item["type"] == "extra_forbidden"
            problems.append(Problem(place=place, text=_sentence(model, place, item), unknown=unknown))
    return problems


def _lifted(model: type[BaseModel], place: Place, inner: Problem) -> Problem:
    """A section's problem as the whole configuration sees it, which may know a better home for an unknown setting."""
    place = place + inner.place
    text = _unknown(model, place) if inner.unknown else inner.text
    return Problem(place=place, text=text, unknown=inner.unknown)


def _unknown(model: type[BaseModel], place: Place) -> str:
    return f"is not a setting{nearest_setting(model, place)}"


def _sentence(model: type[BaseModel], place: Place, item: Mapping[str, Any]) -> str:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(model, place)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"must be {context['expected']}, but {_show(value)} came{_nearest_choice(value, context['expected'])}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"must be {words} {_number(context[key])}, but {_show(value)} came"
    name = _KINDS.get(kind.split("_")[0]) if kind.endswith(("_type", "_parsing", "_float", "_number")) else None
    if name is None:
        return f"{item['msg'][0].lower()}{item['msg'][1:]}, but {_show(value)} came"
    hint = " (put it in quotes)" if name == "text" and isinstance(value, int | float) else ""
    return f"must be {name}, but {_show(value)} came{hint}"


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _nearest_choice(value: object, expected: str) -> str:
    choices = [part for part in expected.split("'") if part.strip(" ,") and part.strip() != "or"]
    near = get_close_matches(str(value), choices, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def nearest_setting(model: type[BaseModel], place: Place) -> str:
    """The hint for an unknown setting: its likely name in that section, else where it exists, else what there is."""
    *path, name = place
    section = _section_at(model, path)
    near = get_close_matches(name, section.model_fields, n=1, cutoff=0.6)
    if near and near[0] != name:
        return f"; did you mean '{'.'.join([*path, near[0]])}'?"
    elsewhere = {".".join(found): found[-1] for found in settings_of(model)}
    homes = [dotted for dotted, last in elsewhere.items() if last == name]
    if not homes:
        homes = [
            dotted for dotted, last in elsewhere.items() if last in get_close_matches(name, elsewhere.values(), n=1)
        ]
    if homes:
        return f"; did you mean {' or '.join(repr(home) for home in homes[:3])}?"
    return f"; there are {', '.join(section.model_fields)}"


def settings_of(model: type[BaseModel], within: Place = ()) -> Iterator[Place]:
    """Every setting of a configuration class, sections opened; a mapping of sections shows its keys as `*`."""
    for name, field in model.model_fields.items():
        section = section_class(field.annotation)
        if section is None:
            yield (*within, name)
        else:
            inner = (*within, name, "*") if is_mapping(field.annotation) else (*within, name)
            yield from settings_of(section, inner)


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The configuration class in `X`, `X | None` or `dict[str, X]`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_class(part))), None)


def is_mapping(annotation: Any) -> bool:
    """Whether the annotation is a mapping of names to sections."""
    return get_origin(annotation) is dict


def _section_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    rest = list(path)
    while rest:
        field = model.model_fields[rest.pop(0)]
        if is_mapping(field.annotation):
            rest.pop(0)
        found = section_class(field.annotation)
        assert found is not None, f"{path} names no section"
        model = found
    return model
