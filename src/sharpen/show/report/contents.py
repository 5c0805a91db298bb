"""What a report says, in the order in which a reader asks.

In: a run directory. Out: a `Report`; everything that is missing or damaged is left out and named. No markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sharpen import __version__
from sharpen.errors import SharpenError
from sharpen.learning.trainer.checkpoint import step_of
from sharpen.models.pieces import auto_class
from sharpen.show.report.evaluations import Evaluated, read_evaluated
from sharpen.show.view.data.measures import Series
from sharpen.show.view.data.run import RunPage, run_page
from sharpen.show.view.diagnoses import diagnosed
from sharpen.show.view.drawing import Scale, Tick, line, over_steps, unit_scale
from sharpen.show.view.files import read_files
from sharpen.show.view.folders import Folder

# The curve of a report as geometry: places in percent of its width and height, which a template draws as SVG.
#
# In: the series of the training and of the evaluations. Out: a `Chart`: a path, points, scales.

MAX_POINTS = 600
"""Steps drawn at most; of more, evenly spaced ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An evaluation: its place, the ends of its interval (None: unknown), what it says in words."""

    x: float
    y: float
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluations: points alone, since nothing was measured between them."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A curve. `training` is an SVG path in a box of 100 x 100, empty if nothing was measured."""

    training_name: str
    training: str
    evaluations: tuple[Evaluations, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def chart(training: Series, evaluations: Sequence[Series]) -> Chart | None:
    """Return the chart of a run; None if nothing was measured."""
    drawn = [series for series in (training, *evaluations) if any(value is not None for value in series.values)]
    if not drawn:
        return None
    across = over_steps([step for series in drawn for step in series.steps])
    up = unit_scale(
        *(series.values for series in drawn), *(ends for one in evaluations for ends in (one.low, one.high))
    )
    pairs = _thinned(list(zip(training.steps, training.values, strict=True)))
    return Chart(
        training_name=training.name,
        training=line([step for step, _ in pairs], [value for _, value in pairs], across, up),
        evaluations=tuple(_evaluations(series, across, up) for series in evaluations if series in drawn),
        x_ticks=tuple(across.ticks(8, whole=True)),
        y_ticks=tuple(up.ticks()),
    )


def _thinned(pairs: Sequence[tuple[int, float | None]]) -> Sequence[tuple[int, float | None]]:
    stride = -(-len(pairs) // MAX_POINTS)
    return pairs if stride <= 1 else [*pairs[:-1:stride], pairs[-1]]


def _evaluations(series: Series, across: Scale, up: Scale) -> Evaluations:
    blank = (None,) * len(series.values)
    rows = zip(series.steps, series.values, series.low or blank, series.high or blank, strict=True)
    points = tuple(
        Point(
            x=across.at(step),
            y=_from_top(value, up),
            low=None if low is None else _from_top(low, up),
            high=None if high is None else _from_top(high, up),
            text=f"{series.name}, step {step}: {value:.3f}"
            + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"),
        )
        for step, value, low, high in rows
        if value is not None
    )
    return Evaluations(name=series.name, points=points)


def _from_top(value: float, up: Scale) -> float:
    return round(100.0 - up.at(value), 2)


HEADLINES = {
    "better": "Better than before",
    "not_shown": "Not shown to be better",
    "worse": "Worse: keep the original",
    "unknown": "Not measured",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The model to use: a checkpoint, or the original. `kept` are the checkpoints that are on the disk."""

    model: str
    original: bool
    kept: tuple[str, ...]

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """What to type, by tool."""
        name = json.dumps(self.model, ensure_ascii=False)
        return (
            ("transformers", f"{auto_class(Path(self.model))}.from_pretrained({name})"),
            ("vLLM", f"vllm serve {self.model}"),
            ("Sharpen", f"sharpen serve {self.model}"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of a run. `settings` are those that somebody chose; `problems` say what is missing."""

    page: RunPage
    evaluated: Evaluated
    chart: Chart | None
    use: Use | None
    settings: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    written: datetime
    version: str

    @property
    def headline(self) -> str:
        """The verdict in a few words; for a run that has not ended, what it is doing."""
        run = self.page.run
        if run.error is not None:
            what = "Stopped" if run.error.interrupted else "Failed"
            return f"{what} after step {run.steps}" if run.steps else f"{what} before the first step"
        kind = run.verdict
        return HEADLINES.get(kind, kind) if kind else f"No verdict: the run is {run.state}"


def read_report(run_dir: Path, *, price_per_hour: float | None = None, now: datetime | None = None) -> Report:
    """Read a run directory, whatever state it is in."""
    folder, files = Folder.of(run_dir), read_files(run_dir)
    page = run_page(folder, files, diagnosed(folder), price_per_hour=price_per_hour)
    problems = list(files.problems)
    try:
        evaluated = read_evaluated(folder.evaluations, str(files.setting("evaluation.decided_by") or "sampled"))
    except SharpenError as error:
        evaluated = Evaluated()
        problems.append(str(error))
    return Report(
        page=page,
        evaluated=evaluated,
        chart=chart(page.learning.training, page.learning.evaluations),
        use=_use(run_dir, files.summary),
        settings=page.settings,
        problems=tuple(problems),
        written=now or datetime.now(UTC),
        version=__version__,
    )


def kept_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints on the disk, in the order of their steps."""
    found = [path for path in run_dir.glob("global_step_*") if path.is_dir() and step_of(path)]
    return sorted(found, key=step_of)


def _use(run_dir: Path, summary: Mapping[str, object]) -> Use | None:
    verdict = summary.get("verdict")
    verdict = verdict if isinstance(verdict, Mapping) else {}
    model = verdict.get("model") or summary.get("model_dir")
    if not isinstance(model, str):
        return None
    kept = tuple(path.name for path in kept_checkpoints(run_dir))
    return Use(model=model, original=bool(verdict.get("original")), kept=kept)
