"""The tasks of a run: a heat map of tasks and steps, one task over the run, the groups of one step.

In: the index. Out: a `TasksPage`, `TaskPage` or `StepPage`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sharpen.show.view.data.search import name_of
from sharpen.show.view.entries import TRAINING
from sharpen.show.view.index import Index, IndexState

COLUMNS = 60
PAGE = 100
QUESTION = 200
"""Characters of a question in the table of tasks."""
ORDERS = ("change", "worse", "name", "first", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the heat map: steps `first` to `last` of the training, or an evaluation (`label`)."""

    label: str
    first: int | None
    last: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A task: its mean reward in each column (None: not there), in the first and the last that it has, and the
    change between them (None with one column alone). `question` is the beginning of what the agent was asked."""

    task: str
    question: str
    cells: tuple[float | None, ...]
    first: float
    last: float
    change: float | None
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksPage:
    """Tasks by columns. `place` is what is shown, of `places`; `better`, `worse` and `same` count all tasks with a
    change; `low` and `high` are the range of all cells, for colours. `text` is what the tasks were filtered by,
    `total` their number without it."""

    place: str
    places: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[TaskRow, ...]
    order: str
    page: int
    num_pages: int
    total: int
    text: str
    better: int
    worse: int
    same: int
    low: float
    high: float
    index: IndexState


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """A rollout of a task in one line, with its answer."""

    name: str
    index: int
    kind: int
    attempt: int
    outcome: str
    reward: float | None
    tokens: int
    answer: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A group with its spread and its rollouts."""

    id: str
    task: str
    place: str
    moment: str
    step: int | None
    version: int
    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    size: int
    scored: int
    tries: tuple[Try, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same task's first and last rollout at one place (`held-out/sampled`), side by side."""

    place: str
    before: GroupRow
    after: GroupRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPage:
    """A task over the run: `question` as the agent was asked, before and after for each evaluation that has both, all
    its groups in order."""

    task: str
    question: str
    pairs: tuple[Pair, ...]
    groups: tuple[GroupRow, ...]
    index: IndexState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPage:
    """The groups rolled out for one step, the widest spread first; `flat` counts those whose rewards are all the same,
    which teach nothing. `previous` and `next` are the steps before and after it that have groups."""

    step: int
    groups: tuple[GroupRow, ...]
    mean: float | None
    flat: int
    outcomes: tuple[tuple[str, int], ...]
    previous: int | None
    next: int | None
    index: IndexState


def tasks_page(index: Index, *, place: str = "", order: str = "change", text: str = "", page: int = 1) -> TasksPage:
    """Return the heat map of a place: by default the evaluation with most moments, else the training. Of the tasks,
    those with `text` in their id or question."""
    state = index.state()
    with index.reading() as connection:
        places = [
            name for (name,) in connection.execute("SELECT place FROM groups GROUP BY place ORDER BY COUNT(*) DESC")
        ]
        place = place if place in places else _default_place(places)
        columns, cells = _training(connection) if place == TRAINING else _evaluations(connection, place)
        asked = _questions(connection, place)
    rows = [_task_row(task, asked.get(task, ""), by_column, len(columns)) for task, by_column in cells.items()]
    total = len(rows)
    rows = [row for row in rows if text.lower() in f"{row.task}\n{row.question}".lower()]
    order = order if order in ORDERS else "change"
    rows.sort(key=lambda row: _sort_key(row, order))
    num_pages = max(1, -(-len(rows) // PAGE))
    page = min(max(page, 1), num_pages)
    changes = [row.change for row in rows if row.change is not None]
    values = [value for row in rows for value in row.cells if value is not None]
    return TasksPage(
        place=place,
        places=tuple(places),
        columns=columns,
        rows=tuple(rows[PAGE * (page - 1) : PAGE * page]),
        order=order,
        page=page,
        num_pages=num_pages,
        total=total,
        text=text,
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
        same=sum(change == 0 for change in changes),
        low=min(values, default=0.0),
        high=max(values, default=1.0),
        index=state,
    )


def task_page(index: Index, task: str) -> TaskPage | None:
    """Return the page of a task; None if the index has no group of it."""
    state = index.state()
    with index.reading() as connection:
        rows = connection.execute("SELECT * FROM groups WHERE task = ? ORDER BY number", (task,)).fetchall()
        if not rows:
            return None
        groups = tuple(_group_row(connection, row) for row in _in_time(rows))
        question = connection.execute(
            "SELECT question FROM words JOIN rollouts USING (number) WHERE task = ? AND question <> '' LIMIT 1", (task,)
        ).fetchone()
    places = dict.fromkeys(group.place for group in groups if group.place != TRAINING)
    by_place = {place: [group for group in groups if group.place == place] for place in places}
    return TaskPage(
        task=task,
        question=question[0] if question else "",
        pairs=tuple(
            Pair(place=place, before=found[0], after=found[-1]) for place, found in by_place.items() if len(found) > 1
        ),
        groups=groups,
        index=state,
    )


def step_page(index: Index, step: int) -> StepPage | None:
    """Return the groups of a step; None if the index has none."""
    state = index.state()
    with index.reading() as connection:
        where = "FROM groups WHERE place = :place AND step"
        values = {"place": TRAINING, "step": step}
        rows = connection.execute(
            f"SELECT * {where} = :step ORDER BY COALESCE(std, -1) DESC, number", values
        ).fetchall()
        if not rows:
            return None
        groups = tuple(_group_row(connection, row) for row in rows)
        outcomes = connection.execute(
            "SELECT outcome, COUNT(*) FROM rollouts WHERE place = :place AND step = :step GROUP BY outcome"
            " ORDER BY 2 DESC",
            values,
        ).fetchall()
        previous = connection.execute(f"SELECT MAX(step) {where} < :step", values).fetchone()[0]
        following = connection.execute(f"SELECT MIN(step) {where} > :step", values).fetchone()[0]
    means = [group.mean for group in groups if group.mean is not None]
    return StepPage(
        step=step,
        groups=groups,
        mean=fmean(means) if means else None,
        flat=sum(group.scored > 1 and group.low == group.high for group in groups),
        outcomes=tuple((outcome, count) for outcome, count in outcomes),
        previous=previous,
        next=following,
        index=state,
    )


def _default_place(places: Sequence[str]) -> str:
    for wanted in ("held-out/sampled", "held-out/greedy", TRAINING):
        if wanted in places:
            return wanted
    return places[0] if places else TRAINING


def _training(connection: sqlite3.Connection) -> tuple[tuple[Column, ...], dict[str, dict[int, tuple[float, int]]]]:
    """Return the columns of the training, each of some steps, and the mean reward of each task in them."""
    first, last = connection.execute("SELECT MIN(step), MAX(step) FROM groups WHERE place = ?", (TRAINING,)).fetchone()
    if first is None:
        return (), {}
    width = -(-(last - first + 1) // COLUMNS)
    columns = tuple(_steps(start, min(start + width - 1, last)) for start in range(first, last + 1, width))
    rows = connection.execute(
        "SELECT task, (step - ?) / ?, AVG(mean), COUNT(mean) FROM groups WHERE place = ? AND mean IS NOT NULL AND"
        " step IS NOT NULL GROUP BY 1, 2",
        (first, width, TRAINING),
    )
    return columns, _cells(rows)


def _steps(first: int, last: int) -> Column:
    return Column(label=f"step {first}" if first == last else f"steps {first} to {last}", first=first, last=last)


def _evaluations(
    connection: sqlite3.Connection, place: str
) -> tuple[tuple[Column, ...], dict[str, dict[int, tuple[float, int]]]]:
    """Return a column for each evaluation at a place, and the mean reward of each task in it."""
    moments = connection.execute(
        "SELECT moment, MAX(step) FROM groups WHERE place = ? GROUP BY moment ORDER BY MIN(number)", (place,)
    ).fetchall()
    order = {moment: number for number, (moment, _) in enumerate(moments)}
    columns = tuple(Column(label=moment, first=step, last=step) for moment, step in moments)
    rows = connection.execute(
        "SELECT task, moment, AVG(mean), COUNT(mean) FROM groups WHERE place = ? AND mean IS NOT NULL GROUP BY 1, 2",
        (place,),
    )
    return columns, _cells((task, order[moment], mean, count) for task, moment, mean, count in rows)


def _cells(rows: Iterable[Any]) -> dict[str, dict[int, tuple[float, int]]]:
    cells: dict[str, dict[int, tuple[float, int]]] = {}
    for task, column, mean, count in rows:
        cells.setdefault(task, {})[column] = (mean, count)
    return cells


def _task_row(task: str, question: str, by_column: Mapping[int, tuple[float, int]], num_columns: int) -> TaskRow:
    values = tuple(by_column[column][0] if column in by_column else None for column in range(num_columns))
    known = [value for value in values if value is not None]
    return TaskRow(
        task=task,
        question=question,
        cells=values,
        first=known[0],
        last=known[-1],
        change=known[-1] - known[0] if len(known) > 1 else None,
        groups=sum(count for _, count in by_column.values()),
    )


def _questions(connection: sqlite3.Connection, place: str) -> dict[str, str]:
    """Return the beginning of what the agent was asked, by task."""
    first = "SELECT MIN(number) FROM rollouts WHERE place = ? GROUP BY task"
    rows = connection.execute(
        f"SELECT task, SUBSTR(question, 1, {QUESTION}) FROM rollouts JOIN words USING (number)"
        f" WHERE number IN ({first})",
        (place,),
    )
    return dict(rows.fetchall())


def _sort_key(row: TaskRow, order: str) -> tuple[float | str, ...]:
    change = 0.0 if row.change is None else row.change
    keys: Mapping[str, tuple[float | str, ...]] = {
        "change": (row.change is None, -change),
        "worse": (row.change is None, change),
        "first": (row.first,),
        "last": (row.last,),
        "name": (),
    }
    return (*keys[order], len(row.task), row.task)


def _in_time(rows: Sequence[sqlite3.Row]) -> list[sqlite3.Row]:
    """Return groups of training and evaluations in the order of their steps, the last evaluation last."""
    last = max((row["step"] for row in rows if row["step"] is not None), default=0)

    def when(row: sqlite3.Row) -> tuple[float, int, int]:
        step = row["step"]
        return (last + 1 if step is None else step, int(row["place"] != TRAINING), row["number"])

    return sorted(rows, key=when)


def _group_row(connection: sqlite3.Connection, row: sqlite3.Row) -> GroupRow:
    tries = connection.execute(
        "SELECT rollouts.*, answer, error FROM rollouts JOIN words USING (number) WHERE group_number = ?"
        " ORDER BY number",
        (row["number"],),
    )
    return GroupRow(
        **{name: row[name] for name in _GROUP_COLUMNS},
        tries=tuple(
            Try(name=name_of(one["number"]), index=one["idx"], **{name: one[name] for name in _TRY_COLUMNS})
            for one in tries
        ),
    )


_GROUP_COLUMNS = ("id", "task", "place", "moment", "step", "version", "mean", "std", "low", "high", "size", "scored")
_TRY_COLUMNS = ("kind", "attempt", "outcome", "reward", "tokens", "answer", "error")
