"""Runs side by side: the paired difference where they were evaluated on the same tasks, the settings that differ, the
curves.

In: each run's folder, files and index. Out: a `ComparePage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sharpen.config.recorded import STARTED
from sharpen.show.monitor.statistics import paired_difference
from sharpen.show.view.data.measures import Measure, Series
from sharpen.show.view.data.run import Cost, cost_of, evaluations, training
from sharpen.show.view.data.runs import RunRow, run_row
from sharpen.show.view.entries import TRAINING
from sharpen.show.view.files import RunFiles
from sharpen.show.view.folders import Folder
from sharpen.show.view.index import Index

_OF_THE_PLACE = ("name", "project", "checkpoint_root_dir", STARTED)
"""What says where and when a run was, not what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much better run `second` is than `first` at a place (`held-out/sampled`) at the end, over the tasks that both
    have, with a paired 95% interval. `same_rows` is False if the datasets are known to differ, None if that is not
    known."""

    place: str
    first: str
    second: str
    difference: Measure
    shared: int
    only_first: int
    only_second: int
    same_rows: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """A setting that is not the same in all runs, with its value in each (empty: not recorded)."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRun:
    """One of the runs."""

    run: RunRow
    cost: Cost
    training: Series
    evaluations: tuple[Series, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePage:
    """Several runs. `incomplete` names the runs whose index is not complete yet, so that tasks may be missing."""

    runs: tuple[CompareRun, ...]
    differences: tuple[Difference, ...]
    settings: tuple[SettingRow, ...]
    incomplete: tuple[str, ...]


def compare_page(runs: Sequence[tuple[Folder, RunFiles, Index]], *, price_per_hour: float | None = None) -> ComparePage:
    """Return the comparison; `price_per_hour` is what a machine costs."""
    rows = [(run_row(folder, files), files) for folder, files, _ in runs]
    rewards = {folder.key: last_rewards(index) for folder, _, index in runs}
    differences = [
        difference
        for (first, files, _), (second, other_files, _) in combinations(runs, 2)
        for difference in _differences(first, second, rewards, _same_rows(files, other_files))
    ]
    return ComparePage(
        runs=tuple(
            CompareRun(
                run=row,
                cost=cost_of(row, files, price_per_hour),
                training=training(row, files),
                evaluations=tuple(evaluations(files)),
            )
            for row, files in rows
        ),
        differences=tuple(differences),
        settings=tuple(_settings([files for _, files in rows])),
        incomplete=tuple(folder.title for folder, _, index in runs if not index.state().complete),
    )


def last_rewards(index: Index) -> dict[str, dict[str, float]]:
    """Return the reward of each task in the last evaluation of each place."""
    rewards: dict[str, dict[str, float]] = {}
    with index.reading() as connection:
        places = connection.execute(
            "SELECT place, moment FROM groups WHERE number IN (SELECT MAX(number) FROM groups WHERE place <> ?"
            " GROUP BY place)",
            (TRAINING,),
        ).fetchall()
        for place, moment in places:
            found = connection.execute(
                "SELECT task, AVG(mean) FROM groups WHERE place = ? AND moment = ? AND mean IS NOT NULL GROUP BY task",
                (place, moment),
            )
            rewards[place] = dict(found.fetchall())
    return rewards


def _differences(
    first: Folder, second: Folder, rewards: Mapping[str, Mapping[str, Mapping[str, float]]], same_rows: bool | None
) -> list[Difference]:
    ours, theirs = rewards[first.key], rewards[second.key]
    found = []
    for place in (place for place in ours if place in theirs):
        before, after = ours[place], theirs[place]
        measure = Measure.of(paired_difference(before, after, among={*before.values(), *after.values()}))
        if measure is not None:
            found.append(
                Difference(
                    place=place,
                    first=first.key,
                    second=second.key,
                    difference=measure,
                    shared=len(before.keys() & after.keys()),
                    only_first=len(before.keys() - after.keys()),
                    only_second=len(after.keys() - before.keys()),
                    same_rows=same_rows,
                )
            )
    return found


def _same_rows(first: RunFiles, second: RunFiles) -> bool | None:
    """Whether two runs were evaluated on the same rows, by their recorded digests."""
    ours, theirs = (files.setting("identity.held_out") for files in (first, second))
    return None if ours is None or theirs is None else bool(ours == theirs)


def _settings(runs: Sequence[RunFiles]) -> list[SettingRow]:
    names = sorted({name for files in runs for name in files.resolved} - set(_OF_THE_PLACE))
    rows = []
    for name in names:
        values = [files.resolved.get(name) for files in runs]
        shown = [_shown(value) for value in values]
        if len(set(shown)) > 1:
            rows.append(SettingRow(name=name, values=tuple(shown)))
    return rows


def _shown(entry: Any) -> str:
    return str(entry.get("value")) if isinstance(entry, Mapping) else ""
