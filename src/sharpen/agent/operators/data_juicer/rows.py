"""Data-Juicer's operators, on tasks and on rollouts.

In: its operators with their arguments, or a recipe file that lists them. Out: the tasks that its filters keep, with the
fields that its mappers changed and the statistics that it computed; rollouts with the statistics as metrics, and those
dropped that its filters drop. The package (py-data-juicer) is imported when one of its operators is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sharpen.agent.operators.changes import drop, with_reward
from sharpen.agent.operators.data_juicer.recipe import Loaded, load
from sharpen.errors import OperatorError
from sharpen.types import Group, Rollout, Task

STATS = "__dj__stats__"
"""The column in which Data-Juicer keeps the statistics of a row."""
_PLACE = "sharpen_place"
_ITS_OWN = "__dj__"


def on_tasks(
    tasks: Sequence[Task],
    operators: Sequence[Mapping[str, Any]] | None = None,
    config_path: str | None = None,
    text_key: str | None = None,
    num_process: int = 1,
) -> list[Task]:
    """Apply Data-Juicer's `operators` (`[{name: arguments}]`), or those of the recipe file `config_path`, to the rows
    of the tasks. `text_key` is the field that an operator reads unless its arguments or the recipe name one. Statistics
    become fields of the row. Raises `ConfigError` for what is missing, `OperatorError` for rows that are no task's."""
    loaded = load(operators, config_path, text_key or "text", num_process)
    return [_changed_task(tasks[place], changes) for place, changes in _processed([task.row for task in tasks], loaded)]


def on_rollouts(
    groups: Sequence[Group],
    operators: Sequence[Mapping[str, Any]] | None = None,
    config_path: str | None = None,
    text_key: str | None = None,
    num_process: int = 1,
) -> list[Group]:
    """Apply Data-Juicer's operators, as `on_tasks`, to the rollouts that take part: one row each, with `prompt_text`,
    `response_text` (the text that operators read unless told otherwise), `reward` and the rollout's metrics. Numbers
    that it computes become metrics under their names; rollouts whose rows it drops are dropped."""
    loaded = load(operators, config_path, text_key or "response_text", num_process)
    scored = [rollout for group in groups for rollout in group.scored]
    after = dict(_processed([_row(rollout) for rollout in scored], loaded))
    changed = {
        rollout.id: _changed_rollout(rollout, after[place]) if place in after else drop(rollout, loaded.names)
        for place, rollout in enumerate(scored)
    }
    return [replace(group, rollouts=tuple(changed.get(one.id, one) for one in group.rollouts)) for group in groups]


def _processed(rows: Sequence[Mapping[str, Any]], loaded: Loaded) -> list[tuple[int, dict[str, Any]]]:
    """The rows that are left: the place of each in `rows`, and the fields that are new or have another value."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    before, after = loaded.process({**columns, _PLACE: list(range(len(rows)))})
    places = [row.get(_PLACE) for row in after]
    if len(set(places)) < len(places) or not all(isinstance(place, int) for place in places):
        raise OperatorError(
            f"Data-Juicer's operators {loaded.names} made rows of their own: use operators that filter, change or "
            "reorder rows"
        )
    return [
        (row[_PLACE], {name: value for name, value in row.items() if name not in old or old[name] != value})
        for row in after
        for old in (before[row[_PLACE]],)
    ]


def _changed_task(task: Task, changes: Mapping[str, Any]) -> Task:
    stats = changes.get(STATS) or {}
    fields = {name: value for name, value in changes.items() if not name.startswith(_ITS_OWN)}
    return replace(task, row={**stats, **task.row, **fields})


def _changed_rollout(rollout: Rollout, changes: Mapping[str, Any]) -> Rollout:
    if other := sorted(changes.keys() & _row(rollout).keys() - {"reward"}):
        raise OperatorError(
            f"Data-Juicer changed {other[0]} of rollout {rollout.id!r}: what happened in a rollout cannot be changed, "
            "only filters, statistics and another reward have an effect"
        )
    stats = {name: float(value) for name, value in (changes.get(STATS) or {}).items() if _is_number(value)}
    rewarded = with_reward(rollout, changes["reward"]) if _is_number(changes.get("reward")) else rollout
    return replace(rewarded, metrics={**rewarded.metrics, **stats})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _row(rollout: Rollout) -> dict[str, Any]:
    """What Data-Juicer sees of a rollout: the messages before its first answer, and its answers."""
    answers = rollout.answers
    prompt = answers[0].messages if answers else ()
    return {
        **rollout.metrics,
        "prompt_text": "\n\n".join(_text(message) for message in prompt),
        "response_text": "\n\n".join(_text(call.response) for call in answers),
        "reward": rollout.reward,
    }


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
