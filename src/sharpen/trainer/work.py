"""What a step trains on: the sequences of each update, and the same packed, with what is known of each token.

In: the sequences of an update, as a `Minibatch` or anything that has the same. Out: `Work`, which the losses fill in.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sharpen.trainer.packing import Pack
from sharpen.types import Experience


class TrainingBatch(Protocol):
    """What one update trains on: sequences with advantages, and weights normalized over the whole update."""

    @property
    def experiences(self) -> Sequence[Experience]:
        """All sequences of the update."""

    @property
    def experts(self) -> Sequence[Experience]:
        """Those of an expert, beside them; looked at only if the algorithm has an expert's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """A `TrainingBatch` and nothing else: rows, or rollouts as they travel to the ranks."""

    experiences: Sequence[Experience]
    experts: Sequence[Experience] = ()


@dataclass(slots=True, kw_only=True)
class Part:
    """A pack, and what is known of its loss entries (shape E) beside what was recorded; None where it is not needed.

    `reference_E`, `teacher_E` and `proximal_E` are logprobs of the reference, of the teacher (of sampled tokens) and
    of the weights before the step's first update, `values_E` and `returns_E` the critic's values then and what it is to
    learn.
    """

    pack: Pack
    reference_E: torch.Tensor | None = None
    teacher_E: torch.Tensor | None = None
    proximal_E: torch.Tensor | None = None
    values_E: torch.Tensor | None = None
    returns_E: torch.Tensor | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.pack.num_computed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The packs of one update. `experts` are those of an expert's rows; `skipped_tokens` are loss tokens that were left
    out because they have no gradient to give."""

    parts: Sequence[Part]
    experts: Sequence[Pack] = ()
    skipped_tokens: int = 0

    @property
    def packs(self) -> list[Pack]:
        """All of them."""
        return [*(part.pack for part in self.parts), *self.experts]
