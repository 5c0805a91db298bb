"""Explains what is wrong with a configuration, in sentences for the user.

In: a pydantic `ValidationError` and the class that raised it. Out: an `InvalidConfigError` with all problems at once:
the setting, its value, and what is allowed; for an unknown setting the nearest valid name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from sharpen.config.secrets import hide_in_urls, hide_in_value
from sharpen.errors import ConfigError

Place = tuple[str, ...]
"""The path of a setting, from the outermost section inwards."""

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
    """A problem of one setting: its place, and the rest of a sentence that starts with the setting's name."""

    place: Place
    text: str
    unknown: bool = False

    def __str__(self) -> str:
        return f"'{'.'.join(self.place)}' {self.text}" if self.place else self.text


class InvalidConfigError(ConfigError):
    """Settings that are unknown, missing or invalid; `problems` holds each of them."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, what: str, problems: Sequence[Problem]) -> InvalidConfigError:
        """Build the error. Several problems get a line each below the first line."""
        if len(problems) == 1:
            return cls(f"{what}: {problems[0]}", problems)
        return cls(
            "\n".join([f"{what}: {len(problems)} problems", *(f"  - {problem}" for problem in problems)]), problems
        )


def explain(model: type[BaseModel], error: ValidationError) -> list[Problem]:
    """Translate pydantic's errors into problems, with places relative to `model`."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        place = tuple(str(part) for part in item["loc"] if part != "[key]")
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, InvalidConfigError):  # raised by the constructor of an inner section
            problems += [_move_outward(model, place, inner) for inner in cause.problems]
        else:
            unknown = item["type"] == "extra_forbidden"
            problems.append(Problem(place=place, text=_sentence(model, place, item), unknown=unknown))
    return problems


def _move_outward(model: type[BaseModel], place: Place, inner: Problem) -> Problem:
    """Move a section's problem to its place in `model`, where an unknown setting may have a nearer valid name."""
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
        return hide_in_urls(str(context["error"]))
    if kind == "literal_error":
        return f"must be {context['expected']}, got {_show(value)}{_nearest_choice(value, context['expected'])}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"must be {words} {_number(context[key])}, got {_show(value)}"
    name = _KINDS.get(kind.split("_")[0]) if kind.endswith(("_type", "_parsing", "_float", "_number")) else None
    if name is None:
        return f"{item['msg'][0].lower()}{item['msg'][1:]}, got {_show(value)}"
    hint = " (put it in quotes)" if name == "text" and isinstance(value, int | float) else ""
    return f"must be {name}, got {_show(value)}{hint}"


def _show(value: object) -> str:
    text = hide_in_urls(repr(hide_in_value(value) if isinstance(value, str) else value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _nearest_choice(value: object, expected: str) -> str:
    choices = [part for part in expected.split("'") if part.strip(" ,") and part.strip() != "or"]
    near = get_close_matches(str(value), choices, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def nearest_setting(model: type[BaseModel], place: Place) -> str:
    """Return a hint for an unknown setting: a similar name in its section, else in other sections, else all names."""
    *path, name = place
    section = section_at(model, path)
    near = get_close_matches(name, section.model_fields, n=1, cutoff=0.6)
    if near and near[0] != name:
        return f"; did you mean '{'.'.join([*path, near[0]])}'?"
    elsewhere = {".".join(other): other[-1] for other in settings_of(model)}
    if "." in name and ".".join(place) in elsewhere:
        section_name, _, last = ".".join(place).rpartition(".")
        return f" by its name with dots: write '{last}' in the section '{section_name}'"
    others = [dotted for dotted, last in elsewhere.items() if last == name]
    if not others:
        others = [
            dotted for dotted, last in elsewhere.items() if last in get_close_matches(name, elsewhere.values(), n=1)
        ]
    if others:
        return f"; did you mean {' or '.join(repr(other) for other in others[:3])}?"
    return f"; there are {', '.join(section.model_fields)}"


def settings_of(model: type[BaseModel], within: Place = ()) -> Iterator[Place]:
    """Yield the place of every setting of a configuration class. `*` stands for the keys of a mapping of sections."""
    for name, field in model.model_fields.items():
        section = section_class(field.annotation)
        if section is None:
            yield (*within, name)
        else:
            inner = (*within, name, "*") if is_mapping(field.annotation) else (*within, name)
            yield from settings_of(section, inner)


def section_class(annotation: Any) -> type[BaseModel] | None:
    """Return the configuration class X in `X`, `X | None` or `dict[str, X]`, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_class(part))), None)


def is_mapping(annotation: Any) -> bool:
    """Whether the annotation is a mapping of names to sections."""
    return get_origin(annotation) is dict


def section_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    """Return the configuration class of the section at a place."""
    rest = list(path)
    while rest:
        field = model.model_fields[rest.pop(0)]
        if is_mapping(field.annotation):
            rest.pop(0)
        found = section_class(field.annotation)
        assert found is not None, f"{path} names no section"
        model = found
    return model
