"""Numbers in 4 and 8 bits, written out to repeat an update.

In: weights, or moments. Out: what is left of weights in NF4 with quantized scales (Dettmers et al. 2023, arXiv
2305.14314), and of moments in 8 bits by blocks (2022, arXiv 2110.02861). Nothing is shared with `models.nf4` or
bitsandbytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

_NF4 = (
    (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen values (appendix E)."""
_SMALL, _LARGE = 64, 256
"""Values with a scale of their own in 4 and in 8 bits."""
_SURE, _UNSURE = 2.0**-22, 2.0**-15
"""How near the middle between two values, of 4 and of 8 bits, either may be taken: bitsandbytes divides, or multiplies
by an inverse; its kernel for processors looks 8 bits up in steps of 2^-15, so that it is up to half of one off."""
_LEAST = 1e-38
_PIECE = 2**20
"""Weights that are rounded, or made again, at a time: what that needs is some fifty bytes for each of them."""
_FEWEST = 4096
"""Moments of fewer numbers stay as they are."""


@functools.cache
def dynamic_values(*, signed: bool) -> Tensor:
    """Return the 256 values of 8 bits (Dettmers, arXiv 1511.04561; 2110.02861, section 1.3): for each of seven powers
    of ten twice as many as for the one below, in the middles of equal steps; 0 and 1; with a sign, of both signs."""
    powers = []
    for power in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (power if signed else power + 1) + 1)
        powers.append(10.0 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2))
    negative = [-values for values in powers] if signed else []
    return torch.cat([*powers, *negative, torch.tensor([0.0, 1.0])]).sort().values


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBits:
    """How frozen weights were rounded to 4 bits: from what type; and whether, where two values are all but equally
    near, to the `other` one, since kernels differ in that."""

    before: torch.dtype
    other: bool

    def kept(self, weight: Tensor) -> InFourBits:
        """Return what a weight (outputs, inputs) is kept as."""
        pieces = [self._codes(rows) for rows in weight.detach().split(max(1, _PIECE // weight.shape[1]))]  # type: ignore[no-untyped-call]
        codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return InFourBits(codes=codes, scales=self._scales(scales), shape=weight.shape)

    def _codes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of some rows of a weight, and the largest number of each block."""
        whole = torch.nn.functional.pad(rows.to(self.before).float(), (0, -rows.shape[1] % _SMALL))
        blocks = whole.reshape(-1, _SMALL)
        scales = blocks.abs().amax(1, keepdim=True)
        codes = _nearest(blocks / scales.clamp(min=_LEAST), torch.tensor(_NF4).flatten(), _SURE, other=self.other)
        codes = codes.to(torch.uint8)
        return codes[:, ::2] << 4 | codes[:, 1::2], scales[:, 0]

    def _scales(self, scales: Tensor) -> Tensor:
        """What the scales of blocks are in 8 bits: how far they are from their mean."""
        mean = scales.mean()
        apart = torch.nn.functional.pad(scales - mean, (0, -len(scales) % _LARGE)).reshape(-1, _LARGE)
        largest = apart.abs().amax(1, keepdim=True)
        values = dynamic_values(signed=True)
        codes = _nearest(apart / largest.clamp(min=_LEAST), values, _UNSURE, other=self.other)
        return (values[codes] * largest).flatten()[: len(scales)] + mean


@dataclass(frozen=True, slots=True, kw_only=True)
class InFourBits:
    """A weight in 4 bits: which of the sixteen values each number is, two to a byte, and the scale of each 64."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size

    def values(self) -> Tensor:
        """Return the numbers that it stands for, in float32."""
        pairs, numbers = _pairs(), torch.empty(len(self.codes), _SMALL)
        count = _PIECE // _SMALL
        for codes, scales, own in zip(*(one.split(count) for one in (self.codes, self.scales, numbers)), strict=True):  # type: ignore[no-untyped-call]
            found = pairs.index_select(0, codes.flatten().int()).view(torch.float32).view(own.shape)
            torch.mul(found, scales[:, None], out=own)
        return numbers.reshape(self.shape[0], -1)[:, : self.shape[1]]


@functools.cache
def _pairs() -> Tensor:
    """The two numbers that each byte stands for, side by side in 64 bits, so that one look-up finds both."""
    values = torch.tensor(_NF4).flatten()
    return torch.cartesian_prod(values, values).view(torch.float64)[:, 0]


def _nearest(numbers: Tensor, values: Tensor, unsure: float, *, other: bool) -> Tensor:
    """Return for each number which of the sorted values is nearest, or the other one of two between which it is
    `unsure`."""
    middles = (values[:-1] + values[1:]) / 2
    if not other:
        return torch.bucketize(numbers, middles)
    below, above = (torch.bucketize(numbers + shift, middles) for shift in (-unsure, unsure))
    unlike = (below != above).nonzero(as_tuple=True)  # few
    below[unlike] += above[unlike] - torch.bucketize(numbers[unlike], middles)
    return below


def in_eight_bits(moment: Tensor) -> bool:
    """Whether a moment of this size is kept in 8 bits."""
    return moment.numel() >= _FEWEST


def in_blocks(moment: Tensor) -> Tensor:
    """Return a moment's numbers, block by block (blocks, 256), with zeros at the end."""
    return torch.nn.functional.pad(moment.flatten(), (0, -moment.numel() % _LARGE)).reshape(-1, _LARGE)


def rounded_moment(moment: Tensor, *, signed: bool, other: bool) -> Tensor:
    """Return what a moment is in 8 bits, each block of 256 in parts of its largest number; `other` as in `FourBits`."""
    blocks = in_blocks(moment)
    largest = blocks.abs().amax(1, keepdim=True)
    values = dynamic_values(signed=signed).to(moment.dtype)
    kept = values[_nearest(blocks / largest.clamp(min=_LEAST), values, _UNSURE, other=other)] * largest
    return kept.flatten()[: moment.numel()].reshape(moment.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class EightBits:
    """A moment as a checkpoint holds it: which of the 256 values each number is, and the largest number of each block
    of 256."""

    codes: Tensor
    largest: Tensor
    signed: bool

    def values(self) -> Tensor:
        """Return the numbers that it stands for."""
        return self._of_codes(dynamic_values(signed=self.signed))

    def nearest_to(self, moment: Tensor) -> Tensor:
        """Return of all moments that are rounded to this one the nearest to another."""
        values = dynamic_values(signed=self.signed).double()
        middles = (values[:-1] + values[1:]) / 2
        end = torch.ones(1, dtype=torch.float64)
        low, high = torch.cat([-end, middles]) - _UNSURE, torch.cat([middles, end]) + _UNSURE
        return moment.double().clamp(self._of_codes(low), self._of_codes(high))

    def _of_codes(self, table: Tensor) -> Tensor:
        """Numbers of a table of 256, in parts of each block's largest."""
        scaled = in_blocks(table[self.codes.long()]) * self.largest.to(table.dtype)[:, None]
        return scaled.flatten()[: self.codes.numel()].reshape(self.codes.shape)
