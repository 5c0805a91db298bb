"""Measures the loss on held-out rows.

In: held-out rows, the tutor and the trainer. Out: `HeldOutLoss`: the mean over all tokens, or over all pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from sharpen.errors import DatasetError
from sharpen.learning.algorithm.supervised import SupervisedAlgorithm
from sharpen.learning.supervised.batches import weighted
from sharpen.learning.supervised.lessons import Tutor
from sharpen.learning.trainer.row_loss import UpdateLoss
from sharpen.types import Experience, Task


class MeasuresRows(Protocol):
    """A trainer, in this process or in several."""

    def measure(self, experiences: Sequence[Experience], /) -> UpdateLoss:
        """Return the losses of rows without training on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """The loss on held-out rows.

    `loss` is in nats per token, or the mean over pairs, without a KL term; `accuracy` and `margin` are as in
    `RowLoss.end`. `rows` does not include `rows_too_long`. `by_row` has for each row the sum of its losses and their
    number (tokens, or one pair).
    """

    loss: float
    rows: int
    rows_too_long: int
    tokens: int
    accuracy: float | None
    margin: float | None
    by_row: Mapping[str, tuple[float, int]]

    def numbers(self) -> dict[str, float]:
        """Return the numbers by name, without those that are None."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "by_row"}
        return {name: float(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Measures the loss on `rows`, `batch_size` at a time."""

    rows: Sequence[Task]
    tutor: Tutor
    trainer: MeasuresRows
    algorithm: SupervisedAlgorithm
    batch_size: int

    def measure(self) -> HeldOutLoss:
        """Measure the loss. Raises `DatasetError` for a row that cannot be trained on, and if no row fits the model."""
        by_pairs = self.algorithm.pair_loss is not None
        algorithm = self.algorithm if by_pairs else replace(self.algorithm, aggregation="token-mean")
        total, units, num_tokens, num_rows, too_long = 0.0, 0, 0, 0, 0
        margins: list[float] = []
        by_row: dict[str, tuple[float, int]] = {}
        for start in range(0, len(self.rows), self.batch_size):
            rows = self.rows[start : start + self.batch_size]
            lessons = [self.tutor.lesson(row) for row in rows]
            too_long += sum(lesson.too_long for lesson in lessons)
            experiences = weighted(lessons, algorithm)
            if not experiences:
                continue
            measured = self.trainer.measure(experiences)
            tokens = sum(int(np.count_nonzero(experience.loss_mask_T)) for experience in experiences)
            count = len(measured.margins) if by_pairs else tokens
            total += (measured.loss - measured.kl_loss) * count
            units += count
            num_tokens += tokens
            num_rows += sum(bool(lesson.experiences) for lesson in lessons)
            margins += measured.margins.values()
            sizes = _loss_tokens(experiences)
            by_row |= {row: (loss * count, 1 if by_pairs else sizes[row]) for row, loss in measured.rows.items()}
        if not units:
            raise DatasetError(
                f"none of the {len(self.rows)} held-out rows fits the model: model.max_model_len is "
                f"{self.tutor.max_model_len}; raise it, or set evaluation.hold_out: false"
            )
        return HeldOutLoss(
            loss=total / units,
            rows=num_rows,
            rows_too_long=too_long,
            tokens=num_tokens,
            accuracy=sum(margin > 0 for margin in margins) / len(margins) if margins else None,
            margin=sum(margins) / len(margins) if margins else None,
            by_row=by_row,
        )


def _loss_tokens(experiences: Sequence[Experience]) -> Counter[str]:
    """Count the loss tokens of each row, by id."""
    sizes: Counter[str] = Counter()
    for experience in experiences:
        sizes[experience.rollout_id] += int(np.count_nonzero(experience.loss_mask_T))
    return sizes
