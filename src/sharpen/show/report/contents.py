"""What a report says, in the order in which a reader asks.

In: a run directory. Out: a `Report`; everything that is missing or damaged is left out and named. No markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sharpen import __version__
from sharpen.errors import SharpenError
from sharpen.learning.trainer.checkpoint import step_of
from sharpen.models.pieces import auto_class
from sharpen.show.report.chart import Chart, chart
from sharpen.show.report.evaluations import Evaluated, read_evaluated
from sharpen.show.view.data.run import RunPage, run_page
from sharpen.show.view.diagnoses import diagnosed
from sharpen.show.view.files import read_files
from sharpen.show.view.folders import Folder

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
