"""One run: what a person asks of it, in that order.

In: its folder, files and prices. Out: a `RunPage`: does it learn, is it sound, why not, where does the time go, what
does it cost, every metric.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sharpen.evidence.certificate.certificate import ComparedGradients
from sharpen.evidence.certificate.checks import MEANING, MEANING_OF_DRAWS, MEANING_OF_ROWS
from sharpen.evidence.certificate.lineage import in_words
from sharpen.show.monitor import spent
from sharpen.show.monitor.statistics import ratio
from sharpen.show.view.data.measures import Count, Series, counts, finite, thinned
from sharpen.show.view.data.runs import SPARK_POINTS, RunRow, run_row
from sharpen.show.view.diagnoses import Diagnosis
from sharpen.show.view.entries import TRAINING
from sharpen.show.view.files import RunFiles
from sharpen.show.view.folders import Folder
from sharpen.show.view.index import Index

if TYPE_CHECKING:
    from sharpen.evidence.diagnose.finding import Finding

_MEANINGS = {**MEANING, **MEANING_OF_DRAWS, **MEANING_OF_ROWS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Does it learn? The training reward (or loss) of each step, with the 95% interval of the mean over its tasks as
    band, and the evaluations with intervals, a series for each dataset and mode."""

    training: Series
    evaluations: tuple[Series, ...]
    verdict_text: str
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """An invariant of the certificate, in a sentence: how much was checked, how much of it broke, the first that
    did."""

    name: str
    meaning: str
    checked: int
    broken: int
    first: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Soundness:
    """Is it sound? `certified` is None without a certificate. `excluded` has the rollouts that did not take part, by
    cause; `staleness` is (oldest, allowed) in policy versions; `updates` says of how many steps the optimizer's updates
    were made once more."""

    certified: bool | None
    checks: tuple[CheckRow, ...]
    problems: tuple[str, ...]
    not_recomputed: tuple[str, ...]
    untested: tuple[str, ...]
    updates: str
    outcomes: tuple[Count, ...]
    excluded: tuple[Count, ...]
    calls: tuple[Count, ...]
    staleness: tuple[int, int] | None
    logprob_gap_mean: float | None
    logprob_gap_max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a finding points to: a rollout, by its id, or a step; neither if the text says it all."""

    text: str
    rollout_id: str | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingCard:
    """A cause that the diagnosis found."""

    name: str
    what: str
    evidence: tuple[tuple[str, float], ...]
    examples: tuple[Reference, ...]
    advice: str
    quotes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """Where does the time go? `parts` are seconds per step (generating, waiting, training, syncing), `total` the whole
    step; `shares` of the whole run."""

    parts: tuple[Series, ...]
    total: Series
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What does it cost? `money` is None without a price."""

    hours: float | None
    sampled_tokens: int | None
    trained_tokens: int | None
    computed_tokens: int | None
    peak_memory_mb: float | None
    price_per_hour: float | None
    money: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric with its first and last value and its course, thinned."""

    name: str
    first: float
    last: float
    low: float
    high: float
    count: int
    spark: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricGroup:
    """The metrics with the same first part of their name."""

    name: str
    metrics: tuple[Metric, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """One run. `no_findings` says why there are no findings: none was found, the diagnosis is being made
    (`diagnosing`), or cannot be made."""

    run: RunRow
    learning: Learning
    soundness: Soundness
    findings: tuple[FindingCard, ...]
    no_findings: str
    diagnosing: bool
    time: TimeUse
    cost: Cost
    metrics: tuple[MetricGroup, ...]
    settings: tuple[tuple[str, str], ...]


def run_page(
    folder: Folder,
    files: RunFiles,
    diagnosis: Diagnosis,
    *,
    margins: Mapping[int, float] | None = None,
    rewards: tuple[float, float] | None = None,
    price_per_hour: float | None = None,
) -> RunPage:
    """Return the page of a run; `margins` are those of `reward_margins`, `rewards` the range of `reward_range`,
    `price_per_hour` is what the machine costs."""
    row = run_row(folder, files)
    return RunPage(
        run=row,
        learning=_learning(row, files, margins or {}, rewards or (-math.inf, math.inf)),
        soundness=_soundness(files),
        findings=tuple(map(_card, diagnosis.findings)),
        no_findings=_why_no_findings(diagnosis, row),
        diagnosing=diagnosis.pending,
        time=_time(files),
        cost=cost_of(row, files, price_per_hour),
        metrics=_metrics(files),
        settings=changed_settings(files),
    )


def series(files: RunFiles, name: str, *, label: str = "", low: str = "", high: str = "") -> Series:
    """Return the course of a metric, with two others as its interval if they are named."""
    rows = {int(row["step"]): row for row in files.rows if name in row}
    chosen = [rows[step] for step in sorted(rows)]
    has_band = bool(low) and any(low in row for row in chosen)
    return Series(
        name=label or name,
        steps=tuple(int(row["step"]) for row in chosen),
        times=tuple(row.get("time") for row in chosen),
        values=tuple(row[name] for row in chosen),
        low=tuple(row.get(low) for row in chosen) if has_band else (),
        high=tuple(row.get(high) for row in chosen) if has_band else (),
    )


def _learning(row: RunRow, files: RunFiles, margins: Mapping[int, float], rewards: tuple[float, float]) -> Learning:
    verdict = files.summary.get("verdict")
    remarks = verdict.get("remarks", ()) if isinstance(verdict, Mapping) else ()
    return Learning(
        training=_with_margins(training(row, files), margins, rewards),
        evaluations=tuple(evaluations(files)),
        verdict_text=row.verdict_text,
        remarks=tuple(map(str, remarks)),
    )


def training(row: RunRow, files: RunFiles) -> Series:
    """Return the training reward, or the training loss."""
    if row.learns_from == "rows":
        return series(files, "trainer/loss", label="training loss")
    return series(files, "reward/mean", label="training reward")


def _with_margins(rewards: Series, margins: Mapping[int, float], among: tuple[float, float]) -> Series:
    """Return a series with the interval of each step whose margin is known, as far as it is `among` the rewards that
    there are: no mean of 0 and 1 is above 1."""
    least, most = among
    pairs = [(value, margins.get(step)) for step, value in zip(rewards.steps, rewards.values, strict=True)]
    if all(value is None or margin is None for value, margin in pairs):
        return rewards
    low = tuple(
        None if value is None or margin is None else max(value - margin, min(least, value)) for value, margin in pairs
    )
    high = tuple(
        None if value is None or margin is None else min(value + margin, max(most, value)) for value, margin in pairs
    )
    return replace(rewards, low=low, high=high)


def reward_margins(index: Index) -> dict[int, float]:
    """Return half the width of the 95% interval of each step's mean training reward. The rollouts of a task are alike,
    so that the tasks count, not the rollouts: the mean is the ratio of the sums of the tasks' rewards and counts. A
    step has none if it has one task, or if its tasks all have the same mean: that says nothing of how others would do.
    """
    last_time = "SELECT MAX(number) FROM groups WHERE place = ? GROUP BY id"  # a step may have been repeated
    sql = f"SELECT step, scored, mean FROM groups WHERE number IN ({last_time}) AND scored > 0 AND step IS NOT NULL"
    groups: dict[int, list[tuple[int, float]]] = {}
    with index.reading() as connection:
        for step, count, mean in connection.execute(sql, (TRAINING,)):
            groups.setdefault(step, []).append((count, mean))
    margins = {step: _margin(tasks) for step, tasks in groups.items() if len(tasks) > 1}
    return {step: margin for step, margin in margins.items() if margin}


def reward_range(index: Index) -> tuple[float, float] | None:
    """Return the lowest and the highest reward of the training; None without any."""
    with index.reading() as connection:
        low, high = connection.execute("SELECT MIN(low), MAX(high) FROM groups WHERE place = ?", (TRAINING,)).fetchone()
    return None if low is None else (low, high)


def _margin(tasks: Sequence[tuple[int, float]]) -> float:
    mean, _, high = ratio([count * of_task for count, of_task in tasks], [count for count, _ in tasks])
    return high - mean


def evaluations(files: RunFiles) -> Iterable[Series]:
    """Yield the evaluations, a series for each dataset and mode."""
    names = dict.fromkeys(name for row in files.rows for name in row if name.startswith("eval"))
    for name in names:
        place, _, last = name.rpartition("/")
        if last == "accuracy":
            prefix, _, mode = place.rpartition("/")
            dataset = prefix.removeprefix("eval").removeprefix("_") or "held-out"
            yield series(files, name, label=f"{dataset} {mode}", low=f"{place}/low", high=f"{place}/high")
        elif name == "eval/loss":
            yield series(files, name, label="held-out loss")


def curve_csv(folder: Folder, files: RunFiles) -> str:
    """Return the curve of a run as CSV: a line for each step, with its time, the training reward (or loss) and the
    evaluations with their intervals; a number that a step has not is left empty."""
    curves = [training(run_row(folder, files), files), *evaluations(files)]
    columns: dict[str, dict[int, float | None]] = {}
    for one in curves:
        for name, values in ((one.name, one.values), (f"{one.name} low", one.low), (f"{one.name} high", one.high)):
            if values:
                columns[name] = dict(zip(one.steps, values, strict=True))
    times = {step: time for one in curves for step, time in zip(one.steps, one.times, strict=True)}
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["step", "time", *columns])
    for step in sorted(times):
        writer.writerow([step, times[step], *(column.get(step) for column in columns.values())])
    return out.getvalue()


def _soundness(files: RunFiles) -> Soundness:
    found = files.certificate
    outcomes = _numbers(found.get("outcomes"))
    gaps = found.get("logprob_gaps")
    gaps = gaps if isinstance(gaps, Mapping) else {}
    staleness = found.get("staleness")
    holds = found.get("holds")
    return Soundness(
        certified=holds if isinstance(holds, bool) else None,
        checks=tuple(_checks(found.get("checks"))),
        problems=_texts(found.get("problems")),
        not_recomputed=_texts(found.get("not_recomputed")),
        untested=_texts(found.get("untested")),
        updates=updates_sentence(found) + gradients_sentence(found),
        outcomes=counts(outcomes),
        excluded=counts({name: count for name, count in outcomes.items() if name != "ok"}),
        calls=counts(_numbers(found.get("calls"))),
        staleness=(int(staleness[0]), int(staleness[1]))
        if isinstance(staleness, list) and len(staleness) == 2
        else None,
        logprob_gap_mean=finite(gaps.get("mean")),
        logprob_gap_max=finite(gaps.get("max")),
    )


def _checks(found: Any) -> Iterable[CheckRow]:
    for check in found if isinstance(found, list) else ():
        if isinstance(check, Mapping) and isinstance(check.get("name"), str):
            first = check.get("first")
            yield CheckRow(
                name=check["name"],
                meaning=_MEANINGS.get(check["name"], ""),
                checked=int(finite(check.get("checked")) or 0),
                broken=int(finite(check.get("broken")) or 0),
                first=first if isinstance(first, str) else None,
            )


def _numbers(found: Any) -> dict[str, int]:
    if not isinstance(found, Mapping):
        return {}
    return {name: int(count) for name, count in found.items() if isinstance(count, int)}


def _texts(found: Any) -> tuple[str, ...]:
    return tuple(map(str, found)) if isinstance(found, list) else ()


def updates_sentence(found: Mapping[str, Any]) -> str:
    """Say of which steps of a certificate the updates were made once more."""
    parts, steps = found.get("repeated"), found.get("steps")
    again: list[int] = []
    for part in parts if isinstance(parts, list) else ():
        first, last = (part.get(name) if isinstance(part, Mapping) else None for name in ("first", "last"))
        if isinstance(first, int) and isinstance(last, int) and 0 <= last - first < 1_000_000:
            again += range(first, last + 1)
    if not again:
        return "The optimizer's update itself is not (sharpen certify --retrain makes it once more)."
    which = in_words(again)
    made = f"The optimizer's updates of steps {which} were made once more by other code, and every weight compared"
    rest = steps - len(set(again)) if isinstance(steps, int) else 0
    return (
        f"{made}; those of the other {rest} were not (sharpen certify --retrain does it)." if rest > 0 else f"{made}."
    )


def gradients_sentence(found: Mapping[str, Any]) -> str:
    """Say of a certificate when gradients were compared with a plain loop's; empty if they never were."""
    lines = []
    parts = found.get("gradients")
    for one in parts if isinstance(parts, list) else ():
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            content = {name: value for name, value in one.items() if name != "step"}
            lines.append(ComparedGradients.from_json(int(one["step"]), content).line)
    return f" The trainer's gradients, compared {'; '.join(lines)}." if lines else ""


def _why_no_findings(diagnosis: Diagnosis, row: RunRow) -> str:
    if diagnosis.pending:
        return "The diagnosis is being made."
    if diagnosis.problem:
        return f"No diagnosis: {diagnosis.problem}"
    if diagnosis.findings:
        return ""
    if row.error is not None and not row.steps:
        return "The run ended before its first step: see above."
    return "The diagnosis found no cause that keeps this run from learning."


def _card(finding: Finding) -> FindingCard:
    return FindingCard(
        name=finding.name,
        what=finding.what,
        evidence=tuple(finding.evidence.items()),
        examples=tuple(map(_reference, finding.read_first or finding.examples)),
        advice=finding.advice,
        quotes=finding.quotes,
    )


def _reference(example: str) -> Reference:
    if example.startswith("step ") and example[5:].isdigit():
        return Reference(text=example, step=int(example[5:]))
    return Reference(text=example, rollout_id=example if "/" in example else None)


def _time(files: RunFiles) -> TimeUse:
    return TimeUse(
        parts=tuple(series(files, metric, label=part) for part, metric in spent.PARTS.items()),
        total=series(files, "time/step_s", label="step"),
        shares=tuple(spent.shares(files.rows).items()),
    )


def cost_of(row: RunRow, files: RunFiles, price: float | None) -> Cost:
    """Return what a run has cost; `price` is that of an hour."""

    def number(name: str) -> int | None:
        value = finite(files.summary.get(name))
        return None if value is None else int(value)

    return Cost(
        hours=row.hours,
        sampled_tokens=row.tokens,
        trained_tokens=number("trained_tokens"),
        computed_tokens=number("computed_tokens"),
        peak_memory_mb=finite(files.summary.get("peak_memory_mb")),
        price_per_hour=price,
        money=None if price is None or row.hours is None else price * row.hours,
    )


def _metrics(files: RunFiles) -> tuple[MetricGroup, ...]:
    groups: dict[str, list[Metric]] = {}
    for name in sorted({name for row in files.rows for name in row} - {"step", "time"}):
        values = [value for _, value in files.values(name)]
        metric = Metric(
            name=name,
            first=values[0],
            last=values[-1],
            low=min(values),
            high=max(values),
            count=len(values),
            spark=thinned(values, SPARK_POINTS),
        )
        groups.setdefault(name.partition("/")[0], []).append(metric)
    first = [name for name in ("reward", "eval", "rollout", "tokens", "time") if name in groups]
    order = [*first, *(name for name in groups if name not in first)]
    return tuple(MetricGroup(name=name, metrics=tuple(groups[name])) for name in order)


def changed_settings(files: RunFiles) -> tuple[tuple[str, str], ...]:
    """Return the settings that somebody chose, by name, with their values as text."""
    return tuple(
        (name, str(entry.get("value")))
        for name, entry in sorted(files.resolved.items())
        if isinstance(entry, Mapping) and entry.get("origin") not in ("default", "chosen", "derived", "dataset", None)
    )
