"""The loss entries of a pack that were sampled from some of the tokens only, and their masks.

In: the sampled ids of each call under a constraint or with a cut distribution, in the order of a pack's entries. Out:
the distinct masks of the pack, and which of them each entry has. They are computed when a model first scores the pack,
and then kept for the others (reference, teacher, the next epoch). Within a constrained response few masks differ, so
that they take little memory. Supports differ with every token: a mask takes an eighth of the vocabulary in bytes.

Shape suffixes: E loss entries of a pack, S sampled tokens of a call, M distinct masks, R rows to score, C rows of a
chunk with a mask, W words of a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sharpen.engine.supports import masks_of
from sharpen.engine.token_masks import MaskArray, TokenMasks
from sharpen.errors import CallError, SamplingError
from sharpen.types import Constraint, IntArray, Supports

FORBIDDEN = -1e30
"""The logit of a token that is not allowed: finite, so that its part of an entropy or divergence is 0, not NaN."""
UNCONSTRAINED = -1
"""The number of the mask of an entry that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedCall:
    """A call whose tokens are the entries `entries_S` of a pack: its constraint, the supports of its tokens, or both.
    `where` names it in messages."""

    constraint: Constraint | None
    supports: Supports | None
    ids_S: IntArray
    entries_S: npt.NDArray[np.int64]
    where: str


class ConstrainedEntries:
    """The constrained entries of one pack."""

    def __init__(self, calls: Sequence[ConstrainedCall], masks: TokenMasks | None) -> None:
        """`masks` are those of the policy's model. Raises `CallError` for a constraint without them: the call cannot be
        scored."""
        for call in calls:
            if call.constraint is not None and masks is None:
                raise CallError(f"{call.where} was sampled under a constraint, which cannot be scored here")
        self._calls = tuple(calls)
        self._masks = masks

    @functools.cached_property
    def masks_MW(self) -> MaskArray:
        """The distinct masks."""
        return self._numbered[0]

    def mask_E(self, num_entries: int) -> npt.NDArray[np.int64]:
        """Return the number of each entry's mask, or `UNCONSTRAINED`: also for entries after those of the pack's calls,
        which no engine sampled."""
        known_E = self._numbered[1]
        return np.pad(known_E, (0, num_entries - len(known_E)), constant_values=UNCONSTRAINED)

    @functools.cached_property
    def _numbered(self) -> tuple[MaskArray, npt.NDArray[np.int64]]:
        """Raises `CallError` for a token that its call's constraint does not allow, or that is not in its support."""
        numbers: dict[bytes, int] = {}
        mask_E = np.full(1 + max(int(call.entries_S.max(initial=-1)) for call in self._calls), UNCONSTRAINED, np.int64)
        for call in self._calls:
            try:
                masks_SW = self._of_call(call)
            except SamplingError as error:
                raise CallError(f"{call.where} cannot be trained on: {error}") from error
            mask_E[call.entries_S] = [numbers.setdefault(mask.tobytes(), len(numbers)) for mask in masks_SW]
        width = max(map(len, numbers))
        return np.stack([np.frombuffer(mask.ljust(width, b"\0"), np.int32) for mask in numbers]), mask_E

    def _of_call(self, call: ConstrainedCall) -> MaskArray:
        """Return the masks of a call's tokens: what its constraint allows, of that the tokens' supports."""
        found = []
        if call.constraint is not None:
            assert self._masks is not None
            found.append(self._masks.of_response(call.constraint, call.ids_S))
        if call.supports is not None:
            found.append(masks_of(call.supports, call.ids_S))
        width = min(masks_SW.shape[1] for masks_SW in found)
        masks_SW: MaskArray = np.bitwise_and.reduce([masks_SW[:, :width] for masks_SW in found])
        return masks_SW


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMasks:
    """The masks of rows to score: `mask_R` are numbers in `masks_MW`, or `UNCONSTRAINED`."""

    mask_R: npt.NDArray[np.int64]
    masks_MW: torch.Tensor

    def chunk(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return, for rows `start:stop`, the numbers of those with a mask, counted from `start`, and their masks; None
        if there are none."""
        rows_C = np.flatnonzero(self.mask_R[start:stop] != UNCONSTRAINED)
        if not len(rows_C):
            return None
        device = self.masks_MW.device
        chosen_C = torch.from_numpy(self.mask_R[start:stop][rows_C]).to(device)
        return torch.from_numpy(rows_C).to(device), self.masks_MW[chosen_C]
