"""The table *before -> after*.

In: two evaluations of the same tasks. Out: lines of at most 100 columns, without control characters.

    held-out (512 tasks)    before                after                 difference (paired)
    greedy accuracy         0.418 [0.376, 0.461]  0.979 [0.962, 0.988]  +0.561 [+0.514, +0.604]
"""

from __future__ import annotations

import math

from agenttune.monitor.statistics import Accuracy, Difference, Evaluation, accuracy, is_binary, paired_difference

Row = tuple[str, str, str, str]


def comparison_lines(before: Evaluation, after: Evaluation) -> list[str]:
    """The table: a block for the held-out tasks, then one for each further dataset that both evaluations have."""
    blocks = [_block("held-out", before, after)]
    blocks += [
        _block(name, further, after.further[name]) for name, further in before.further.items() if name in after.further
    ]
    widths = [max(len(row[column]) for block in blocks for row in block) for column in range(4)]
    rule = "-" * (sum(widths) + 2 * 3)
    lines: list[str] = []
    for heading, *rows in blocks:
        lines += [_row(heading, widths), rule, *(_row(row, widths) for row in rows), ""]
    return [*lines, "in brackets: 95% intervals; the difference is paired by task"]


def _block(name: str, before: Evaluation, after: Evaluation) -> list[Row]:
    rows: list[Row] = []
    sizes = []
    for mode, first, second in (
        ("greedy", before.greedy, after.greedy),
        ("sampled", before.sampled, after.sampled),
    ):
        if not first or not second:
            continue
        kind = "accuracy" if is_binary([*first.values(), *second.values()]) else "reward"
        difference = paired_difference(first, second)
        old, new = accuracy(first.values()), accuracy(second.values())
        rows.append((f"{mode} {kind}", _mean(old), _mean(new), _difference(difference)))
        sizes += [old.num_tasks, new.num_tasks, difference.num_tasks]
    least, most = min(sizes, default=0), max(sizes, default=0)
    tasks = f"{most} tasks" if least == most else f"{least} to {most} tasks"
    return [(f"{name} ({tasks})", "before", "after", "difference"), *rows]


def _row(cells: Row, widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _mean(found: Accuracy) -> str:
    return f"{found.accuracy:.3f} {_interval(f'{found.low:.3f}', f'{found.high:.3f}', found.low)}"


def _difference(found: Difference) -> str:
    return f"{found.difference:+.3f} {_interval(f'{found.low:+.3f}', f'{found.high:+.3f}', found.low)}"


def _interval(low: str, high: str, value: float) -> str:
    return "[unknown]" if math.isnan(value) else f"[{low}, {high}]"
