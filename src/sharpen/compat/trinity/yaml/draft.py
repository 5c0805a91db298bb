"""What the conversion of a Trinity-RFT file has found so far, and the rules that single keys follow.

In: one key after another, with its value. Out: a tree of our settings, where each came from, lines to print, and every
problem. A key that no rule has answered for is a mistake of ours: `unanswered` is empty at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharpen.config.explain import Place, Problem

Rule = Callable[["Draft", str, Any], None]
"""What happens with one key: it is applied, said, without effect, or refused."""

OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
"""Values that switch a feature off."""


class Draft:
    """A conversion under way. Keys are dotted, as the file has them; places are dotted names of our settings."""

    def __init__(self, file: str, environment: Mapping[str, str]) -> None:
        self.file = file
        self.environment = environment
        self.given: dict[str, Any] = {}
        self.lengths: dict[str, int] = {}  # of the lists of sections
        self.tree: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.origins: dict[Place, str] = {}
        self.lines: list[str] = []
        self.problems: list[Problem] = []
        self.evaluate_only = False
        self._idle: dict[str, list[str]] = {}
        self._answered: set[str] = set()

    def set(self, place: str | Place, value: Any, key: str) -> None:
        """Apply: `place` of our settings gets `value`."""
        path = _path(place)
        _put(self.tree, path, value)
        self.origins[path] = f"{self.file}: {key}"
        self._answered.add(key)

    def set_default(self, place: str | Place, value: Any, key: str) -> None:
        """Apply the value that Trinity-RFT takes where the file leaves `key` out."""
        path = _path(place)
        _put(self.defaults, path, value)
        self.origins.setdefault(path, f"Trinity-RFT's default of {key}")

    def say(self, text: str, *keys: str) -> None:
        """Tell what becomes of keys that mean something else here."""
        if keys:
            self.lines.append(
                f"{self.file}: {', '.join(f'{key} = {shown(self.given.get(key))}' for key in keys)}: {text}"
            )
        self._answered.update(keys)

    def idle(self, key: str, reason: str) -> None:
        """Name the key in the notice of those without effect."""
        self._idle.setdefault(reason, []).append(key)
        self._answered.add(key)

    def same(self, *keys: str) -> None:
        """The value is how it is here anyway."""
        self._answered.update(keys)

    def refuse(self, key: str, text: str) -> None:
        """The key, or its value, cannot be honoured: `text` continues "'key' is <value>: ..."."""
        self.wrong(key, f"is {shown(self.given.get(key))}: {text}")

    def wrong(self, key: str, text: str) -> None:
        """A problem with a key: `text` continues "'key' ..."."""
        self.problems.append(Problem(place=tuple(key.split(".")), text=text))
        self._answered.add(key)

    def number(self, key: str) -> float | None:
        """The key's number; None where it is absent or, with a problem noted, something else."""
        value = self.given.get(key)
        if value is None:
            return None
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            self.wrong(key, f"must be a number, but {shown(value)} came")
            return None

    def whole(self, key: str) -> int | None:
        """The key's whole number, as `number`."""
        value = self.number(key)
        if value is not None and value != int(value):
            self.wrong(key, f"must be a whole number, but {shown(self.given[key])} came")
            return None
        return None if value is None else int(value)

    def flag(self, key: str) -> bool | None:
        """The key's truth value, as `number`."""
        value = self.given.get(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is not None and not isinstance(value, bool):
            self.wrong(key, f"must be true or false, but {shown(value)} came")
            return None
        return value

    def word(self, key: str) -> str | None:
        """The key's text, as `number`."""
        value = self.given.get(key)
        if value is not None and not isinstance(value, str):
            self.wrong(key, f"must be text, but {shown(value)} came")
            return None
        return value

    def notices(self) -> tuple[str, ...]:
        """The lines, and the one notice of everything without effect."""
        if not self._idle:
            return tuple(self.lines)
        rows = [f"  {', '.join(_joined(keys))}: {reason}" for reason, keys in self._idle.items()]
        return (*self.lines, "\n".join([f"{self.file}: without effect here:", *rows]))

    def unanswered(self) -> list[str]:
        """Keys that nothing was said about."""
        return [key for key in self.given if key not in self._answered]


def to(*places: str) -> Rule:
    """The value goes, as it is, to settings of ours."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        for place in places:
            draft.set(place, value, key)

    return rule


def idle(reason: str) -> Rule:
    """No effect here, for this reason."""
    return lambda draft, key, value: draft.idle(key, reason)


def refused(text: str, unless: Sequence[Any] = OFF) -> Rule:
    """Refused, except for values that switch the feature off."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if is_one_of(value, unless):
            draft.same(key)
        else:
            draft.refuse(key, text)

    return rule


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Whether a value is one of these, a text from the environment (`"false"`, `"0"`) by what it says."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    elif isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def later(draft: Draft, key: str, value: Any) -> None:
    """Decided together with other keys, when all are known."""


def shown(value: object) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _path(place: str | Place) -> Place:
    return tuple(place.split(".")) if isinstance(place, str) else place


def _put(tree: dict[str, Any], path: Place, value: Any) -> None:
    *sections, name = path
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = dict(value) if isinstance(value, Mapping) else value


def _joined(keys: Sequence[str]) -> list[str]:
    """Keys of one section written once: `cluster.{node_num, gpu_per_node}`."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, dot, name = key.rpartition(".")
        sections.setdefault(section + dot, []).append(name)
    return [
        f"{section}{{{', '.join(names)}}}"
        if section and len(names) > 1
        else ", ".join(section + name for name in names)
        for section, names in sections.items()
    ]
