"""What a report says, in the order in which a reader asks.

In: a run directory. Out: a `Report`; everything that is missing or damaged is left out and named. No markup. Of its
evaluations (`evaluations.db`), for each place (`held-out/sampled`): the means before and after with the paired
difference, and the tasks that changed most with both answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from sharpen import __version__
from sharpen.agent.transcript import TRIMMED, message_text
from sharpen.errors import ImageError, SharpenError
from sharpen.learning.experience.reading import find_rollouts, read_groups
from sharpen.learning.experience.records import CHECK
from sharpen.learning.trainer.checkpoint import step_of
from sharpen.models.pieces import auto_class
from sharpen.show.monitor.statistics import accuracy, paired_difference
from sharpen.show.view.data.measures import Measure, Series
from sharpen.show.view.data.run import RunPage, run_page
from sharpen.show.view.diagnoses import diagnosed
from sharpen.show.view.drawing import Scale, Tick, line, over_steps, unit_scale
from sharpen.show.view.files import read_files
from sharpen.show.view.folders import Folder
from sharpen.types import Outcome, Picture, Rollout

MODES = ("sampled", "greedy")
NUM_CHANGED, NUM_WORSE = 5, 2
"""Tasks shown, and how many of them are among those that got worse, if there are so many."""
MAX_TEXT = 2000
MAX_PICTURES, PICTURE_SIDE = 4, 160
"""Images shown of a task, and the most pixels of each side: the page stays a small file."""
Rewards = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A place before and after: the means, the paired difference, and how many tasks changed. `moments` are the names
    of the two evaluations."""

    place: str
    moments: tuple[str, str]
    before: Measure | None
    after: Measure | None
    difference: Measure | None
    better: int
    worse: int
    same: int

    @property
    def count(self) -> int:
        """The tasks that are compared; of a single evaluation, all."""
        shown = self.difference or self.before
        return 0 if shown is None else shown.count

    @property
    def name(self) -> str:
        """The place as people say it: `held-out, sampled`."""
        return ", ".join(self.place.rsplit("/", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the agent answered: its last text, its reward (None: it has none, and `outcome` says why)."""

    text: str
    reward: float | None
    outcome: str
    rollout_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTask:
    """A task with both answers. `question` is what the agent was asked first, `row` the task as JSON. `pictures` are
    small copies of the images that it was shown first, as data URLs, of which there are `num_pictures`."""

    task: str
    place: str
    question: str
    row: str
    before: Answer
    after: Answer
    pictures: tuple[str, ...] = ()
    num_pictures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """All places, and the tasks that changed most at the first of them."""

    comparisons: tuple[Comparison, ...] = ()
    changed: tuple[ChangedTask, ...] = ()


def read_evaluated(evaluations: Path, decided_by: str = "sampled") -> Evaluated:
    """Read the first and the last evaluation of each place; the held-out tasks in the mode that decides come first.
    Raises `JournalError` if the file cannot be read."""
    if not evaluations.exists():
        return Evaluated()
    rewards = _rewards(evaluations)
    places = sorted(rewards, key=lambda place: (not place.startswith("held-out/"), not place.endswith(decided_by)))
    among = frozenset(value for place in rewards.values() for of in place.values() for value in of.values())
    comparisons = [_comparison(place, rewards[place], among) for place in places]
    changed: list[ChangedTask] = []
    if comparisons and comparisons[0].difference is not None:
        first, (before, after) = comparisons[0].place, comparisons[0].moments
        tasks = most_changed(rewards[first][before], rewards[first][after])
        changed = [_changed(evaluations, first, (before, after), task) for task in tasks]
    return Evaluated(comparisons=tuple(comparisons), changed=tuple(changed))


def most_changed(before: Rewards, after: Rewards, count: int = NUM_CHANGED) -> list[str]:
    """Return the tasks whose reward changed most, those that got better first. Up to two that got worse are among
    them, even if more got better by as much."""
    changes = {task: after[task] - before[task] for task in before if task in after and after[task] != before[task]}
    better = sorted((task for task in changes if changes[task] > 0), key=lambda task: (-changes[task], task))
    worse = sorted((task for task in changes if changes[task] < 0), key=lambda task: (changes[task], task))
    num_worse = max(min(len(worse), NUM_WORSE), min(len(worse), count - len(better)))
    return [*better[: count - num_worse], *worse[:num_worse]]


def _rewards(evaluations: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return the mean reward of each task by place and moment, in the order of the evaluations."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for entry in find_rollouts(evaluations):
        moment, _, rest = entry.group_id.partition("/")
        name = next((f"/{mode}/" for mode in MODES if f"/{mode}/" in rest), None)
        if name is None or moment == CHECK:
            continue
        dataset, _, task = rest.partition(name)
        tasks = found.setdefault(f"{dataset}{name[:-1]}", {}).setdefault(moment, {})
        if entry.reward is not None and entry.outcome != Outcome.FILTERED:
            tasks.setdefault(task, []).append(entry.reward)
    return {
        place: {moment: {task: fmean(some) for task, some in tasks.items()} for moment, tasks in moments.items()}
        for place, moments in found.items()
    }


def _comparison(place: str, moments: Mapping[str, Rewards], among: frozenset[float]) -> Comparison:
    names = [*moments]
    first, last = moments[names[0]], moments[names[-1]]
    several = len(names) > 1
    changes = [last[task] - first[task] for task in first if task in last] if several else []
    return Comparison(
        place=place,
        moments=(names[0], names[-1]),
        before=Measure.of(accuracy(first.values(), among=among)),
        after=Measure.of(accuracy(last.values(), among=among)) if several else None,
        difference=Measure.of(paired_difference(first, last, among=among)) if several else None,
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
        same=sum(change == 0 for change in changes),
    )


def _changed(evaluations: Path, place: str, moments: Sequence[str], task: str) -> ChangedTask:
    groups = [list(read_groups(evaluations, group_id=f"{moment}/{place}/{task}"))[-1] for moment in moments]
    before, after = (_answer(group.rollouts) for group in groups)
    asked = next((call for rollout in groups[0].rollouts for call in rollout.calls), None)
    shown = () if asked is None else tuple(span.picture for span in asked.pictures)
    return ChangedTask(
        task=task,
        place=place,
        question=_question(groups[0].rollouts),
        row=_short(json.dumps(groups[0].task.row, ensure_ascii=False, default=str)),
        before=before,
        after=after,
        pictures=tuple(_small_copies(shown)),
        num_pictures=len(shown),
    )


def _small_copies(pictures: Sequence[Picture]) -> Iterator[str]:
    """Yield the first pictures as data URLs; one that cannot be read is left out."""
    from sharpen.models.images import small_copy

    for picture in pictures[:MAX_PICTURES]:
        with suppress(ImageError):
            yield Picture.of(small_copy(picture.data, PICTURE_SIDE)).data_url


def _question(rollouts: Iterable[Rollout]) -> str:
    messages = [message for rollout in rollouts for call in rollout.calls[:1] for message in call.messages]
    return next((_short(message_text(m)) for m in messages if m.get("role") in ("user", "prompt")), "")


def _answer(rollouts: Sequence[Rollout]) -> Answer:
    """Return what the first rollout of a task answered; the reward is that of its own."""
    rollout = rollouts[0]
    said = [f"({TRIMMED})"] if rollout.trimmed else [message_text(call.response) for call in rollout.answers]
    return Answer(
        text=_short(next((text for text in reversed(said) if text), "")),
        reward=rollout.reward,
        outcome=rollout.outcome.value,
        rollout_id=rollout.id,
    )


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} [... {len(text) - MAX_TEXT:,} more characters]"


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
