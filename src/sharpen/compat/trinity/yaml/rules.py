"""The rules that the rows of Trinity-RFT's table are made of: what becomes of a key.

In: a draft, a key and its value. Out: the draft, which knows what became of the key. A key of a kind (`whole`, `flag`,
...) is checked, and left to the module that decides it together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from sharpen.compat.trinity.yaml.draft import OFF, Draft, is_one_of, shown

Rule = Callable[[Draft, str, Any], None]
"""What happens with one key: it is applied, told, without effect, refused, or left for later."""


def expanded(rows: Mapping[str, Rule], section: str = "") -> dict[str, Rule]:
    """Rules by key, of rows that name one key or several."""
    return {f"{section}{name}": rule for names, rule in rows.items() for name in names.split()}


def to(*places: str) -> Rule:
    """The value goes, as it is, to settings of ours."""
    return lambda draft, key, value: draft.move(key, *places)


def idle(reason: str) -> Rule:
    """No effect here, for this reason."""
    return lambda draft, key, value: draft.idle(reason, key)


def told(text: str, unless: Sequence[Any] = OFF) -> Rule:
    """A line says what happens here, unless the value is one of these."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if not is_one_of(draft.get(key), unless):
            draft.say(text, key)

    return rule


def refused(text: str, unless: Sequence[Any] = OFF) -> Rule:
    """Refused, except for these values, which say how it is here anyway."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if not is_one_of(draft.get(key), unless):
            draft.refuse(key, text)

    return rule


def both(first: Rule, second: Rule) -> Rule:
    """One rule, then the other."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        first(draft, key, value)
        second(draft, key, value)

    return rule


def fixed(value: Any) -> Rule:
    """Accepted at this value only."""
    return refused(f"it is {value!r} here: leave it out", unless=(value,))


def choice(choices: Mapping[str, Mapping[str, Any]]) -> Rule:
    """One of these words, each with the settings that it becomes."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if not isinstance(draft.get(key), str) or value not in choices:
            draft.refuse(key, f"use {alternatives(choices)}")
            return
        for place, setting in choices[value].items():
            draft.set(place, setting, key)

    return rule


def at(place: str, words: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For `choice`: words that become values of one setting."""
    return {word: {place: value} for word, value in words.items()}


def itself(*words: str) -> dict[str, str]:
    """Words that are the same here."""
    return {word: word for word in words}


def later(draft: Draft, key: str, value: Any) -> None:
    """Decided together with other keys, when all are known."""


def _of_kind(kind: str, parse: Callable[[Any], Any]) -> Rule:
    """Decided later, as a value of this kind; another is a problem, and the key counts as not given."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        try:
            draft.given[key] = parse(value)
        except (TypeError, ValueError, OverflowError):
            draft.wrong(key, f"must be {kind}, got {shown(value)}")
            del draft.given[key]

    return rule


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return value if isinstance(value, int) else float(value)


def _whole(value: Any) -> int:
    if _number(value) != int(_number(value)):
        raise ValueError
    return int(_number(value))


def _flag(value: Any) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower())
    if not isinstance(value, bool):
        raise ValueError
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return {str(name): inner for name, inner in value.items()}


number = _of_kind("a number", _number)
whole = _of_kind("a whole number", _whole)
flag = _of_kind("true or false", _flag)
word = _of_kind("text", _word)
mapping = _of_kind("a section of settings", _mapping)


def follow(draft: Draft, key: str, rule: Rule) -> None:
    """Answer for a key by a rule, if it is given."""
    if draft.get(key) is not None:
        rule(draft, key, draft.given[key])


def answer_section(draft: Draft, key: str, rules: Mapping[str, Rule], unknown: str, *, swallows: bool = False) -> None:
    """Answer for a section whose keys depend on what else the file says, in the rules' order. Null means not given; a
    key without a rule is a problem, in the words `unknown`; where Trinity-RFT takes and ignores such keys (`swallows`),
    it is without effect.
    """
    value = draft.get(key)
    if is_one_of(value, OFF):
        return
    if not isinstance(value, Mapping):
        draft.wrong(key, f"must be a section of settings, got {shown(value)}")
        return
    given = {str(name): inner for name, inner in value.items() if inner is not None}
    draft.given |= {f"{key}.{name}": inner for name, inner in given.items()}
    for name in [name for name in rules if name in given]:
        rules[name](draft, f"{key}.{name}", given[name])
        draft.get(f"{key}.{name}")
    for name in [name for name in given if name not in rules]:
        if swallows:
            draft.idle(f"Trinity-RFT takes it and makes no use of it{nearest(name, rules)}", f"{key}.{name}")
        else:
            draft.wrong(f"{key}.{name}", unknown + nearest(name, rules))


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint for an unknown name: the one that was meant, else what there is."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(known) or 'none'}"


def alternatives(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def function_place(name: str) -> str:
    """`package.module.Class`, as Trinity-RFT writes it, in our form; registered names stay."""
    if ":" in name or "." not in name or "/" in name:
        return name
    module, _, attribute = name.rpartition(".")
    return f"{module}:{attribute}"
