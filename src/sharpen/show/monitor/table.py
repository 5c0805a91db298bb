"""The table *before -> after*.

In: two evaluations of the same tasks. Out: lines that fit the screen, without control characters.

    held-out (512 tasks)    before                after                 difference (paired)
    greedy accuracy         0.418 [0.376, 0.461]  0.979 [0.962, 0.988]  +0.561 [+0.514, +0.604]
      judge/exact           0.311 [0.272, 0.352]  0.902 [0.873, 0.925]  +0.591 [+0.543, +0.632]

Below the reward of each mode are the metrics of workflow and judge, prefixed with who measured them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sharpen.screen import PLAIN, fitted
from sharpen.show.monitor.figures import number, signed, with_interval
from sharpen.show.monitor.statistics import (
    Evaluation,
    accuracy,
    distinct_rewards,
    distinct_values,
    is_binary,
    paired_difference,
)

NARROW = 90
"""Columns below which a table is stacked."""
MAX_METRICS = 12
"""Metrics shown for each mode; `summary.json` has all."""
_BRACKETS = "in brackets: 95% intervals; the difference is paired by task"
Row = tuple[str, str, str, str]


def comparison_lines(before: Evaluation, after: Evaluation, *, width: int = PLAIN) -> list[str]:
    """Return the table: a block for the held-out tasks, then one for each further dataset that both evaluations
    have. On a screen narrower than 90 columns the numbers of a row stand below each other."""
    scale = _Scale(before, after)
    blocks = [_block("held-out", before, after, scale)]
    blocks += [
        _block(name, further, after.further[name], scale)
        for name, further in before.further.items()
        if name in after.further
    ]
    if width < NARROW:
        return _stacked(blocks, width)
    numbers = [max(len(row[column]) for block in blocks for row in block) for column in range(1, 4)]
    room = max(16, width - sum(numbers) - 2 * 3)
    blocks = [[(shortened(row[0], room), *row[1:]) for row in block] for block in blocks]
    widths = [max(len(row[0]) for block in blocks for row in block), *numbers]
    rule = "-" * (sum(widths) + 2 * 3)
    lines: list[str] = []
    for heading, *rows in blocks:
        lines += [_row(heading, widths), rule, *(_row(row, widths) for row in rows), ""]
    return [*lines, _BRACKETS]


def _stacked(blocks: Sequence[Sequence[Row]], width: int) -> list[str]:
    lines: list[str] = []
    for (heading, *titles), *rows in blocks:
        lines += [heading, "-" * min(len(heading), width - 1)]
        for name, *cells in rows:
            lines.append(name)
            lines += [f"    {title:<10}  {cell}" for title, cell in zip(titles, cells, strict=True) if cell]
        lines.append("")
    return [*lines, *fitted(_BRACKETS, width - 1, hanging=0)]


def evaluation_line(
    name: str, found: Evaluation, before: Evaluation | None, whole: Evaluation, width: int
) -> list[str]:
    """Return one evaluation in a line, with the paired difference to `before`; a line for each mode where one is too
    long for `width`. `whole` is the evaluation that `found` is a part of."""
    among = distinct_rewards(whole, before)
    parts = []
    for mode, rewards in found.rewards.items():
        if not rewards:
            continue
        first = {} if before is None else before.rewards.get(mode, {})
        change = ""
        if first.keys() & rewards.keys():
            gain = paired_difference(first, rewards, among=among).difference
            change = f"  {number(gain, sign=True)}"
        parts.append(f"{mode} {with_interval(accuracy(rewards.values(), among=among))}{change}")
    line = "  ".join([name, *parts])
    return [line] if len(line) <= width else [f"{name}  {part}" for part in parts]


class _Scale:
    """Which numbers occur in a run: all of them decide what a mean is and what interval it has."""

    def __init__(self, before: Evaluation, after: Evaluation) -> None:
        self._evaluations = (before, after)
        self.rewards = distinct_rewards(before, after)

    def metric(self, name: str) -> frozenset[float]:
        return distinct_values(name, *self._evaluations)


def _block(name: str, before: Evaluation, after: Evaluation, scale: _Scale) -> list[Row]:
    rows: list[Row] = []
    sizes = []
    for mode, first in before.rewards.items():
        second = after.rewards[mode]
        if not first or not second:
            continue
        kind = "accuracy" if is_binary(scale.rewards) else "reward"
        both = len(first.keys() & second.keys())
        rows.append((f"{mode} {kind}", *_numbers(first, second, scale.rewards)))
        sizes += [len(first), len(second), both]
        rows += _metrics(before.metrics.get(mode, {}), after.metrics.get(mode, {}), both, scale)
    least, most = min(sizes, default=0), max(sizes, default=0)
    tasks = f"{most} tasks" if least == most else f"{least} to {most} tasks"
    return [(f"{name} ({tasks})", "before", "after", "difference"), *rows]


def _metrics(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]], num: int, scale: _Scale
) -> list[Row]:
    """Return rows for what workflow and judge measured both times, with the number of tasks if it differs from the
    reward's."""
    rows: list[Row] = []
    for name in [name for name in before if name in after][:MAX_METRICS]:
        both = len(before[name].keys() & after[name].keys())
        if both:
            shown = f"  {name}" if both == num else f"  {name} ({both})"
            rows.append((shown, *_numbers(before[name], after[name], scale.metric(name))))
    if (more := len(before.keys() & after.keys()) - MAX_METRICS) > 0:
        rows.append((f"  and {more} more", "", "", ""))
    return rows


def _numbers(before: Mapping[str, float], after: Mapping[str, float], among: frozenset[float]) -> tuple[str, str, str]:
    old, new = accuracy(before.values(), among=among), accuracy(after.values(), among=among)
    change = signed(paired_difference(before, after, among=among), old.accuracy, new.accuracy)
    return with_interval(old), with_interval(new), change


def _row(cells: Row, widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def shortened(name: str, width: int) -> str:
    """Shorten a name to at most `width` columns by leaving out its middle."""
    if len(name) <= width:
        return name
    head = (width - 2) // 2
    return f"{name[:head]}..{name[len(name) - (width - 2 - head) :]}"
