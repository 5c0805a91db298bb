"""What the steps of a run without rollouts trained, for the plain loop: the rows of its dataset.

In: a run directory. Out: a `PlainStep` for each step. As in `certificate.rows`, the code that made the sequences of
rows makes them again; their weights are counted anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from sharpen.config.run import RunConfig
from sharpen.evidence.certificate.certify import Settings
from sharpen.evidence.certificate.plain.begin import PlainStep
from sharpen.evidence.certificate.plain.model import PlainSequence
from sharpen.evidence.certificate.plain.optimizers import Rates
from sharpen.evidence.certificate.plain.steps import row_loss, unrepeatable
from sharpen.evidence.certificate.rows import read_expert_lessons, read_lessons
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.supervised.lessons import Lesson
from sharpen.types import Experience


class RowSteps:
    """The steps of a run on rows."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        self._settings = settings
        self._lessons, self._missing = read_lessons(run_dir, settings.now)

    def step(self, step: int) -> PlainStep | str:
        """Return a step, or say why it cannot be repeated."""
        config, lessons = self._settings.config(step), self._lessons.get(step)
        for reason in unrepeatable(config):
            return reason
        if lessons is None:
            return next(iter(self._missing), "its rows are not those of the dataset any more")
        updates = _updates(lessons, config.trainer.num_minibatches, config, config.loss.constant_length)
        loss, pairs = row_loss(config)
        return PlainStep(
            updates=updates,
            epochs=config.trainer.epochs,
            loss=loss,
            rates=Rates.of(config),
            pairs=pairs,
            balance=config.trainer.balance_coef,
        )


class ExpertRowSteps:
    """The rows of an expert in the steps of a run with rollouts."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        self._settings = settings
        self._lessons, self._missing = read_expert_lessons(run_dir, settings.now)

    def updates(self, step: int, parts: int) -> list[list[PlainSequence]] | str:
        """Return the sequences of each of the `parts` updates of a step, or say why they are not known."""
        if step not in self._lessons:
            return self._missing
        config = self._settings.config(step)
        lessons = [lesson for lesson in self._lessons[step] if lesson.experiences]
        return _updates(lessons, parts, config, Rules.of(config).constant_length)


def _updates(lessons: Sequence[Lesson], parts: int, config: RunConfig, length: int | None) -> list[list[PlainSequence]]:
    """Split lessons evenly over updates. `length` is that of the aggregation by a constant length."""
    bounds = [len(lessons) * part // parts for part in range(parts + 1)]
    return [[*_update(lessons[start:end], config, length)] for start, end in pairwise(bounds)]


def _update(lessons: Sequence[Lesson], config: RunConfig, length: int | None) -> Iterator[PlainSequence]:
    """Yield the sequences of an update. A turn of a row counts as a call, the row as a rollout."""
    numbered = [(number, one) for number, lesson in enumerate(lessons) for one in lesson.experiences]
    places = [np.flatnonzero(one.loss_mask_T) for _, one in numbered]
    turns = [
        [(number, int(one.calls_T[at])) for at in of_one]
        for (number, one), of_one in zip(numbered, places, strict=True)
    ]
    of_turn = Counter(turn for of_one in turns for turn in of_one)
    of_row = Counter(number for of_one in turns for number, _ in of_one)
    aggregation = config.loss.aggregation or "token-mean"
    for (number, one), of_one, keys in zip(numbered, places, turns, strict=True):
        shares = {
            "token-mean": [of_turn.total()] * len(keys),
            "sequence-mean-token-mean": [len(of_turn) * of_turn[key] for key in keys],
            "sequence-mean-token-sum": [len(of_turn)] * len(keys),
            "rollout-mean": [len(of_row) * of_row[number]] * len(keys),
            "constant-length": [len(of_row) * (length or 0)] * len(keys),
        }
        yield _sequence(one, of_one, 1.0 / torch.tensor(shares[aggregation], dtype=torch.float64))


def _sequence(one: Experience, places_S: np.ndarray, weights_S: torch.Tensor) -> PlainSequence:
    advantages_S = one.advantages_T[places_S]
    return PlainSequence(
        owner=one.group_id,
        ids_T=torch.tensor(one.ids_T, dtype=torch.long),
        places_S=torch.tensor(places_S),
        recorded_S=torch.zeros(len(places_S)),
        weights_S=weights_S,
        pictures=one.pictures,
        advantage=float(advantages_S[0]) if len(advantages_S) else 0.0,
    )
