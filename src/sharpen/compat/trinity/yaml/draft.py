"""What the conversion of a Trinity-RFT file has found so far.

In: one key after another, with its value. Out: a tree of our settings, where each came from, lines to print, and every
problem. A key that nothing has read or answered for is a mistake of ours: `unanswered` is empty at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sharpen.config.explain import Place, Problem

OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
"""Values that switch a feature off."""


class Draft:
    """A conversion under way. Keys are dotted, as the file has them; places are dotted names of our settings.

    `given` holds the value of every key; `get` reads it and answers for the key.
    """

    def __init__(
        self, file: str, environment: Mapping[str, str], without_value: Mapping[str, Problem] | None = None
    ) -> None:
        self.file = file
        self.environment = environment
        self.given: dict[str, Any] = {}
        self.lengths: dict[str, int] = {}  # of the lists of sections
        self.tree: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.origins: dict[Place, str] = {}
        self.endpoint: dict[str, str] | None = None
        self.lines: list[str] = []
        self._without_value = dict(without_value or {})  # interpolations, by key
        self.problems: list[Problem] = list(self._without_value.values())
        self._idle: dict[str, list[str]] = {}
        self._answered: set[str] = set()

    @property
    def evaluate_only(self) -> bool:
        """Whether the file asks for an evaluation, whatever its algorithm is."""
        return self.given.get("mode") == "bench"

    @property
    def in_two_processes(self) -> bool:
        """Whether the file is for the explorer or the trainer alone, of an algorithm with rollouts."""
        return self.given.get("mode") in ("explore", "train", "serve") and not self.trains_by(("sft", "cpt", "dpo"))

    def trains_by(self, algorithms: Collection[str]) -> bool:
        """Whether the file trains, by one of these algorithms."""
        name = self.given.get("algorithm.algorithm_type")
        return isinstance(name, str) and name in algorithms and not self.evaluate_only

    def get(self, key: str) -> Any:
        """The key's value, None where it is not given; it is answered for."""
        self._answered.add(key)
        return self.given.get(key)

    def set(self, place: str | Place, value: Any, key: str) -> None:
        """Apply: `place` of our settings gets `value`."""
        path = _path(place)
        _put(self.tree, path, value)
        self.origins[path] = f"{self.file}: {key}"
        self._answered.add(key)

    def move(self, key: str, *places: str | Place) -> None:
        """Apply the key's value as it is, if it is given."""
        for place in places if key in self.given else ():
            self.set(place, self.given[key], key)

    def set_default(self, place: str | Place, value: Any, key: str) -> None:
        """Apply, where the file sets nothing, the value that Trinity-RFT takes where `key` is left out."""
        path = _path(place)
        if path not in self.origins:
            _put(self.defaults, path, value)
            self.origins[path] = f"Trinity-RFT's default of {key}"

    def say(self, text: str, *keys: str) -> None:
        """Tell what becomes of keys that mean something else here; without keys, what the file leaves open."""
        named = ", ".join(f"{key} = {shown(self.given.get(key))}" for key in keys)
        self.lines.append(": ".join(part for part in (self.file, named, text) if part))
        self._answered.update(keys)

    def idle(self, reason: str, *keys: str) -> None:
        """Name the keys that are given in the notice of those without effect."""
        if given := [key for key in keys if key in self.given]:
            self._idle.setdefault(reason, []).extend(given)
        self._answered.update(keys)

    def refuse(self, key: str, text: str) -> None:
        """The key, or its value, cannot be honoured: `text` continues "'key' is <value>: ..."."""
        self.wrong(key, f"is {shown(self.given.get(key))}: {text}")

    def wrong(self, key: str, text: str) -> None:
        """A problem with a key: `text` continues "'key' ..."."""
        if not any(f"{other}.".startswith(f"{key}.") for other in self._without_value):  # else it has been said
            self.problems.append(Problem(place=tuple(key.split(".")), text=text))
        self._answered.add(key)

    def notices(self) -> tuple[str, ...]:
        """The lines, and the one notice of everything without effect."""
        if not self._idle:
            return tuple(self.lines)
        rows = [f"  {', '.join(_joined(keys))}: {reason}" for reason, keys in self._idle.items()]
        return (*self.lines, "\n".join([f"{self.file}: without effect here:", *rows]))

    def unanswered(self) -> list[str]:
        """Keys that nothing was said about."""
        return [key for key in self.given if key not in self._answered]


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Whether a value is one of these, a text from the environment (`"false"`, `"0"`) by what it says."""
    if isinstance(value, str):
        value = value.lower()
        if value in ("true", "false"):
            value = value == "true"
        else:
            with contextlib.suppress(ValueError):
                value = float(value)
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


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
