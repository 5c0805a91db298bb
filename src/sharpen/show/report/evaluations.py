"""What the evaluations of a run say, task by task.

In: `evaluations.db`. Out: for each place (`held-out/sampled`) the means before and after with the paired difference,
and the tasks that changed most with both answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from sharpen.agent.transcript import TRIMMED, message_text
from sharpen.errors import ImageError
from sharpen.learning.experience.reading import find_rollouts, read_groups
from sharpen.learning.experience.records import CHECK
from sharpen.show.monitor.statistics import accuracy, paired_difference
from sharpen.show.view.data.measures import Measure
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
