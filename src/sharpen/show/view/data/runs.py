"""The table of runs.

In: each run's folder and files. Out: a `RunsPage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sharpen.config.recorded import STARTED
from sharpen.evidence.ended import Ended
from sharpen.show.view.data.measures import Measure, finite, thinned
from sharpen.show.view.files import RunFiles
from sharpen.show.view.folders import Folder, State, state_of

SPARK_POINTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run in one line. `key` names it in URLs, `title` is its name for people. It began at `started` (Unix time).
    `measure` says what `before`, `after` and `change` measure (`sampled accuracy`, `held-out loss`); `verdict` is its
    kind (`better`, `not_shown`, `worse`, `unknown`; None: not ended). `certified` is None if there is no certificate
    yet. `spark` is the course of the training reward (or loss), thinned. `error` is what ended the run early (None:
    nothing did, or it works again). `problems` says what is missing or damaged in the directory."""

    key: str
    name: str
    title: str
    project: str
    path: str
    state: State
    model: str | None
    algorithm: str | None
    learns_from: str
    steps: int
    total_steps: int | None
    started: float | None
    updated: float | None
    measure: str
    before: Measure | None
    after: Measure | None
    change: Measure | None
    verdict: str | None
    verdict_text: str
    certified: bool | None
    hours: float | None
    tokens: int | None
    reward: float | None
    spark: tuple[float, ...]
    error: Ended | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsPage:
    """All runs, sorted and filtered as asked."""

    rows: tuple[RunRow, ...]
    sort: str
    descending: bool
    text: str
    total: int


SORTS = ("name", "model", "algorithm", "steps", "before", "after", "change", "hours", "tokens", "updated", "reward")


def runs_page(
    runs: Iterable[tuple[Folder, RunFiles]], *, sort: str = "updated", descending: bool = True, text: str = ""
) -> RunsPage:
    """Return the runs whose name, project, model or algorithm contains `text`, sorted by a column of `SORTS`."""
    rows = [run_row(folder, files) for folder, files in runs]
    wanted = [row for row in rows if text.lower() in _searched(row)]
    sort = sort if sort in SORTS else "updated"
    known = [row for row in wanted if _sort_value(row, sort) is not None]
    unknown = [row for row in wanted if _sort_value(row, sort) is None]
    known.sort(key=lambda row: _sort_value(row, sort), reverse=descending)
    return RunsPage(rows=(*known, *unknown), sort=sort, descending=descending, text=text, total=len(rows))


def run_row(folder: Folder, files: RunFiles) -> RunRow:
    """Return the line of a run."""
    verdict = files.summary.get("verdict")
    verdict = verdict if isinstance(verdict, Mapping) else {}
    measure, before, after = _results(files, str(verdict.get("measure", "")))
    from_rows = not any("reward/mean" in row for row in files.rows) and any("trainer/loss" in row for row in files.rows)
    course = [value for _, value in files.values("trainer/loss" if from_rows else "reward/mean")]
    times = [row["time"] for row in files.rows if "time" in row]
    error = Ended.of(files.summary)
    state = state_of(folder, ended=bool(verdict), failed=error is not None and not error.interrupted)
    return RunRow(
        key=folder.key,
        name=folder.name,
        title=folder.title,
        project=folder.project,
        path=str(folder.path),
        state=state,
        model=_text(files.setting("model.model_path")),
        algorithm=_text(files.setting("algorithm.algorithm_type")),
        learns_from="rows" if from_rows else "rollouts",
        steps=max((int(row["step"]) for row in files.rows), default=_int(files.summary.get("steps")) or 0),
        total_steps=_int(files.setting("train_dataset.total_steps")),
        started=finite(files.setting(STARTED)) or min(times, default=None),
        updated=max([*times, *filter(None, [finite(files.setting(STARTED))])], default=None),
        measure=measure,
        before=before,
        after=after,
        change=_change(verdict),
        verdict=_text(verdict.get("kind")),
        verdict_text=str(verdict.get("text", "")),
        certified=_certified(files),
        hours=_hours(files, times),
        tokens=_tokens(files),
        reward=None if from_rows or not course else course[-1],
        spark=thinned(course, SPARK_POINTS),
        error=None if state == "running" else error,
        problems=files.problems,
    )


def _searched(row: RunRow) -> str:
    return " ".join(filter(None, (row.name, row.title, row.project, row.model, row.algorithm))).lower()


def _sort_value(row: RunRow, sort: str) -> Any:
    value = getattr(row, sort)
    if isinstance(value, Measure):
        return value.value
    return value.lower() if isinstance(value, str) else value


def _results(files: RunFiles, measure: str) -> tuple[str, Measure | None, Measure | None]:
    """Return what was measured before and after, in the mode that decides: of the summary, or, during the run, the
    evaluations so far."""
    mode = measure.split(" ", 1)[0] if measure.split(" ", 1)[0] in ("greedy", "sampled") else ""
    mode = mode or _text(files.setting("evaluation.decided_by")) or "sampled"
    evaluated = [_evaluated(row, mode) for row in files.rows if f"eval/{mode}/accuracy" in row]
    before, after = (_summarized(files.summary, when, mode) for when in ("before", "after"))
    if evaluated:
        first_step = min(int(row["step"]) for row in files.rows if f"eval/{mode}/accuracy" in row)
        before = before or (evaluated[0] if first_step == 0 else None)
        after = after or (evaluated[-1] if len(evaluated) > 1 or first_step else None)
    if before or after:
        return measure or f"{mode} reward", before, after
    losses = files.values("eval/loss")
    if losses:
        later = Measure(value=losses[-1][1]) if len(losses) > 1 else None
        return "held-out loss", Measure(value=losses[0][1]), later
    return measure, None, None


def _evaluated(row: Mapping[str, float], mode: str) -> Measure:
    name = f"eval/{mode}"
    return Measure(value=row[f"{name}/accuracy"], low=row.get(f"{name}/low"), high=row.get(f"{name}/high"))


def _summarized(summary: Mapping[str, Any], when: str, mode: str) -> Measure | None:
    try:
        numbers = summary[when][mode]
        value, low, high = (finite(numbers[name]) for name in ("accuracy", "low", "high"))
        return None if value is None else Measure(value=value, low=low, high=high, count=int(numbers["num_tasks"]))
    except (KeyError, TypeError, ValueError):
        return None


def _change(verdict: Mapping[str, Any]) -> Measure | None:
    value = finite(verdict.get("difference"))
    if value is None:
        return None
    low, high = finite(verdict.get("low")), finite(verdict.get("high"))
    return Measure(value=value, low=low, high=high, count=_int(verdict.get("num_tasks")) or 0)


def _certified(files: RunFiles) -> bool | None:
    holds = files.certificate.get("holds")
    return holds if isinstance(holds, bool) else None


def _hours(files: RunFiles, times: list[float]) -> float | None:
    """The hours of all sessions, from the first record to the last; of a run in one session, from its start."""
    seconds = [value for value in (finite(files.summary.get("seconds")),) if value is not None]
    seconds += [max(times) - min(times)] if times else []
    return max(seconds) / 3600 if seconds else None


def _tokens(files: RunFiles) -> int | None:
    sampled = finite(files.summary.get("sampled_tokens"))
    if sampled is None and (values := files.values("tokens/sampled")):
        sampled = sum(value for _, value in values)
    return None if sampled is None else int(sampled)


def _int(value: Any) -> int | None:
    number = finite(value)
    return None if number is None else int(number)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
