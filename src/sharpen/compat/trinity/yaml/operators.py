"""The operators of a Trinity-RFT file, on experiences.

In: a draft and the key of a list of operators. Out: the draft, with `sampling.operators`, or the settings that do an
operator's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from sharpen.compat.trinity.yaml.draft import OFF, Draft, is_one_of, shown
from sharpen.compat.trinity.yaml.rules import function_place
from sharpen.operators.pipeline import ON_ROLLOUTS

_TRUNCATED = "mask_response_truncated"
_NEEDLESS = {"pass_rate_calculator": "the mean reward of each task is always kept, and difficulty_based goes by it"}
"""Operators whose work is done here anyway."""
_OWN = (
    "one of your own is a function over the groups of a step, named 'file.py:function' or 'package.module.function' "
    "(docs/use/operators.md)"
)


def on_experiences(draft: Draft, key: str, value: Any) -> None:
    """Operators on a step's experiences: those on rollouts here."""
    operators: list[dict[str, Any]] = []
    for place, name, arguments in _items(draft, key):
        if name in _NEEDLESS:
            draft.idle(_NEEDLESS[name], key)
        elif name == _TRUNCATED:
            draft.set("sampling.overlong_filter", True, key)
            draft.say(
                f"{_TRUNCATED} is sampling.overlong_filter: cut rollouts do not train (there, they still count in "
                "their group's mean and deviation)"
            )
        elif name in ON_ROLLOUTS or ":" in name or "." in name:
            operators.append({"name": function_place(name), "args": arguments})
        else:
            near = get_close_matches(name, [*ON_ROLLOUTS, _TRUNCATED], n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join([*ON_ROLLOUTS, _TRUNCATED])};"
            draft.wrong(place, f"is '{name}', which is no operator here{hint} {_OWN}")
    if operators:
        draft.set("sampling.operators", operators, key)


def _items(draft: Draft, key: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The key, the name and the arguments of each operator of a list; what is none is a problem."""
    value = draft.get(key)
    if is_one_of(value, OFF):
        return
    if not isinstance(value, list):
        draft.wrong(key, f"must be a list of operators, each with name and args, got {shown(value)}")
        return
    for index, item in enumerate(value):
        name = item.get("name") if isinstance(item, Mapping) else None
        arguments = (item.get("args") if isinstance(item, Mapping) else None) or {}
        known = isinstance(name, str) and isinstance(arguments, Mapping) and not item.keys() - {"name", "args"}
        if known:
            yield f"{key}[{index}].name", str(name), {str(one): inner for one, inner in arguments.items()}
        else:
            draft.wrong(f"{key}[{index}]", f"must have a name and args, got {shown(item)}")
