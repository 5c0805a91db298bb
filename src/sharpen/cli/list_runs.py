"""`sharpen ls`: the runs below a folder with what came out of each, the latest at the end.

In: run directories, also unfinished and damaged ones. Out: a table, or two lines for each run where the terminal is
narrower than 90 columns; what cannot be read is left empty.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from sharpen.cli.arguments import add_json, add_root, count, print_json, say
from sharpen.evidence.ended import Ended

NARROW = 90
_HEADINGS = ("run", "state", "step", "algorithm", "held-out", "verdict", "written")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """What `ls` says about a run. `state` is `running`, `done`, `failed` or `stopped`; `error` is the first line of
    what ended it early. `before` and `after` are held-out results of the mode that decides (the loss of a run without
    rollouts); `written` is the Unix time of its last record."""

    name: str
    run_dir: Path
    state: str
    error: str | None
    step: int | None
    model: str | None
    algorithm: str | None
    before: float | None
    after: float | None
    verdict: str | None
    written: float


def add_ls(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_root(parser)
    parser.add_argument("--limit", type=count, default=50, metavar="N", help="at most the last N runs (default: 50)")
    add_json(parser)


def run_ls(arguments: argparse.Namespace, out: IO[str] | None = None) -> int:
    """Print the runs below `--root`."""
    from sharpen.run.found import list_runs
    from sharpen.screen import columns_of

    out = out or sys.stdout
    found = list_runs(arguments.root)
    runs = [describe_run(path) for path in found[-arguments.limit :]]
    if arguments.json:
        print_json([asdict(run) for run in runs], out)
        return 0
    if not runs:
        say(f"no run below {arguments.root}", file=out)
        return 0
    if len(found) > len(runs):
        say(f"the last {len(runs)} of {len(found)} runs (--limit N shows more)", file=out)
    columns = columns_of(out) if out.isatty() else 1000
    for line in _table(runs, columns):
        say(line, file=out)
    return 0


def describe_run(run_dir: Path) -> RunLine:
    """Read what a run directory says about itself."""
    from sharpen.config.recorded import last_line, last_recorded
    from sharpen.run.lock import is_working
    from sharpen.show.view.files import read_json

    settings = {name: _object(found).get("value") for name, found in read_json(run_dir / "resolved.json")[0].items()}
    summary = read_json(run_dir / "summary.json")[0]
    verdict, ended = _object(summary.get("verdict")), Ended.of(summary)
    mode = str(settings.get("evaluation.decided_by") or "sampled")
    working = is_working(run_dir)
    return RunLine(
        name=f"{run_dir.parent.name}/{run_dir.name}",
        run_dir=run_dir,
        state="running" if working else _state(ended, bool(verdict)),
        error=None if working or ended is None else ended.line,
        step=int(last["step"]) if (last := last_line(run_dir / "metrics.jsonl")) else None,
        model=_text(settings.get("model.model_path")),
        algorithm=_text(settings.get("algorithm.algorithm_type")),
        before=measured(summary, "before", mode),
        after=measured(summary, "after", mode),
        verdict=None if working else _text(verdict.get("kind")),
        written=last_recorded(run_dir),
    )


def _state(ended: Ended | None, judged: bool) -> str:
    if ended is not None and not ended.interrupted:
        return "failed"
    return "done" if judged else "stopped"


def _object(value: Any) -> Mapping[str, Any]:
    """Return what must be an object; an empty one if it is damaged."""
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def measured(summary: Mapping[str, Any], when: str, mode: str) -> float | None:
    """Return what a summary says of the held-out tasks `before` or `after`: the accuracy in a mode, or the loss of a
    run without rollouts; None if it says nothing."""
    found = _object(_object(summary.get(when)).get(mode)).get("accuracy")
    if found is None:
        found = _object(_object(summary.get("held_out")).get(when)).get("loss")
    return found if isinstance(found, float | int) else None


def _table(runs: Sequence[RunLine], columns: int) -> Iterator[str]:
    rows = [_cells(run) for run in runs]
    widths = [max(len(row[column]) for row in (*rows, _HEADINGS)) for column in range(len(_HEADINGS))]
    if columns < max(NARROW, sum(widths) + 2 * len(widths) - 2):
        for run, row in zip(runs, rows, strict=True):
            yield row[0]
            yield "  " + "  ".join(filter(None, row[1:]))
            yield from _why(run, columns)
        return
    for row, why in ((_HEADINGS, []), *((row, _why(run, columns)) for run, row in zip(runs, rows, strict=True))):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield from why


def _why(run: RunLine, columns: int) -> list[str]:
    """Return what ended a run, as a line below it."""
    if run.error is None:
        return []
    return textwrap.wrap(run.error, columns, initial_indent="  ! ", subsequent_indent="    ", max_lines=2)


def _cells(run: RunLine) -> tuple[str, ...]:
    before, after = ("" if value is None else f"{value:.3f}" for value in (run.before, run.after))
    return (
        run.name,
        run.state,
        "" if run.step is None else str(run.step),
        run.algorithm or "",
        f"{before or '?'} -> {after}" if after else before,
        (run.verdict or "").replace("_", " "),
        age(time.time() - run.written) if run.written else "",
    )


def age(seconds: float) -> str:
    """Format how long ago something was: `42 s ago`, `3 min ago`, `5 h ago`, `12 days ago`."""
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} s ago"
