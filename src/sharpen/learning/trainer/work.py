"""The data of a training step: the sequences of each update, and their packs with scores for each token.

In: the sequences of an update, as a `TrainingBatch`. Out: `Work`, which the losses fill in.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sharpen.learning.trainer.packing import IndexArray, Pack
from sharpen.models.balance import Balance
from sharpen.types import BoolArray, Experience, FloatArray, HalfArray


class TrainingBatch(Protocol):
    """The sequences of one update, with advantages, and weights normalized over the whole update."""

    @property
    def experiences(self) -> Sequence[Experience]:
        """The rollouts' sequences, or the rows."""

    @property
    def experts(self) -> Sequence[Experience]:
        """The expert's sequences; used only if the algorithm has an expert loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """A plain `TrainingBatch`: rows, or rollouts as they are sent to the ranks."""

    experiences: Sequence[Experience]
    experts: Sequence[Experience] = ()


@dataclass(slots=True, kw_only=True)
class Part:
    """A pack and the scores of its loss entries (shape E), each None if the algorithm does not need it.

    `reference_E`, `teacher_E` and `proximal_E` are logprobs of the sampled tokens under the reference, the teacher and
    the weights before the step's first update; of a teacher with other tokens `teacher_E` is that of the entry's chunk,
    whose number in the pack is in `chunks_E` (None: each entry is its own). `values_E` are the critic's values before
    that update, `returns_E` its targets, `energies_E` those of `algorithm.token_baseline` under the weights before it.
    `moments_3E` are entropy, varentropy and cumulative probability (`scores`) under the policy in the first update on
    the pack. `balance` is what the pack adds to the balance loss of an update.

    `left_out_E` are the entries whose advantage was set to 0 to leave them out of the policy loss. Of the last update
    on the pack, `log_ratios_E` and `clipped_E` are those of `PolicyTokens`: NaN for a truncated distribution, and the
    entries that were left out are clipped too.
    """

    pack: Pack
    reference_E: torch.Tensor | None = None
    teacher_E: torch.Tensor | None = None
    chunks_E: IndexArray | None = None
    proximal_E: torch.Tensor | None = None
    values_E: torch.Tensor | None = None
    returns_E: torch.Tensor | None = None
    energies_E: torch.Tensor | None = None
    moments_3E: FloatArray | None = None
    balance: Balance | None = None
    left_out_E: BoolArray | None = None
    log_ratios_E: HalfArray | None = None
    clipped_E: BoolArray | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.pack.num_computed_tokens

    def left_out_with(self, further_E: BoolArray) -> BoolArray:
        """Return the entries that are left out, these among them."""
        return further_E if self.left_out_E is None else self.left_out_E | further_E


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The packs of one update. `experts` are packs of an expert's rows; `skipped_tokens` counts loss tokens left out
    because their gradient is zero."""

    parts: Sequence[Part]
    experts: Sequence[Pack] = ()
    skipped_tokens: int = 0

    @property
    def packs(self) -> list[Pack]:
        """All packs, the expert's last."""
        return [*(part.pack for part in self.parts), *self.experts]
