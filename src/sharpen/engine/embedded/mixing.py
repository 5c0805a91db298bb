"""Runs the recurrent and convolution layers of one step over the slots' states.

In: the model, whose layers are taken over; for each step, which rows decode and which are segments of prompts. Out: the
layers' output for these rows (zero for padding), and the states of exactly their slots moved on.

The decoding rows of a step are one call. Segments of different lengths are computed one by one, or cut into pieces of
equal length that several of them have, whichever costs less.

Shape suffixes: N rows of the step, B sequences of one call, T tokens of each, C hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sharpen.engine.embedded.attention import SlotSegment
from sharpen.engine.embedded.beside import Adapters, Rows
from sharpen.engine.embedded.slots import Indices
from sharpen.engine.embedded.states import StatePool
from sharpen.models.recurrent import Mixer

_CALL_TOKENS = 64
"""What a call costs beside its tokens, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows that one call computes: `length` rows from `first_row` on for each slot."""

    slots: tuple[int, ...]
    first_rows: tuple[int, ...]
    length: int


class Mixing:
    """The recurrent and convolution layers of a model, over the states of a pool."""

    def __init__(self, mixers: Sequence[Mixer], pool: StatePool, device: torch.device) -> None:
        """Take the layers over: from now on they compute the rows that `lay_out` announced last."""
        self._mixers = mixers
        self._pool = pool
        self._device = device
        self._cut = (
            functools.partial(pieces, chunk=max(mixer.chunk for mixer in mixers))
            if all(mixer.continues for mixer in mixers)
            else single_pieces
        )
        self._decoding: torch.Tensor | None = None  # slots (B), which are their rows too
        self._are_first = False  # whether those are the slots 0 .. B - 1
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []  # slots (B) and rows (B, T)
        self.adapters: Adapters | None = None
        """The adapters by name, if the engine serves some. They know the step's rows before `lay_out`."""
        self._decoding_rows: Rows | None = None
        self._piece_rows: list[Rows | None] = []
        for layer, mixer in enumerate(mixers):
            mixer.module.forward = functools.partial(self._mix, layer)

    def lay_out(self, decoding: Indices, segments: Sequence[SlotSegment]) -> None:
        """Say what the rows of the next forward pass are: row r decodes for slot r of `decoding`; then segments."""
        self._decoding = torch.from_numpy(decoding).to(self._device) if len(decoding) else None
        self._are_first = bool(len(decoding)) and int(decoding[-1]) == len(decoding) - 1
        self._pieces = [self._on_device(piece) for piece in self._cut(segments)]
        if self.adapters is not None:
            self._decoding_rows = None if self._decoding is None else self.adapters.some(self._decoding)
            self._piece_rows = [self.adapters.some(rows_BT.flatten()) for _, rows_BT in self._pieces]

    def _computing(self, piece: int | None) -> AbstractContextManager[None]:
        """Let the adapters compute the rows of a piece; None: those that decode."""
        if self.adapters is None:
            return nullcontext()
        return self.adapters.computing(self._decoding_rows if piece is None else self._piece_rows[piece])

    def _on_device(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        first_B1 = torch.tensor(piece.first_rows, device=self._device).unsqueeze(1)
        rows_BT = first_B1 + torch.arange(piece.length, device=self._device)
        return torch.tensor(piece.slots, device=self._device), rows_BT

    def _mix(self, layer: int, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Compute one layer for all rows, in place of its own forward pass; (1, N, C) to (1, N, C)."""
        mixer = self._mixers[layer]
        mixed_1NC = torch.zeros_like(hidden_states)
        if self._decoding is not None:
            with self._computing(None):
                self._decode(layer, hidden_states[0], mixed_1NC[0])
        for piece, (slots_B, rows_BT) in enumerate(self._pieces):
            before = self._pool.read(layer, slots_B)
            with self._computing(piece):
                mixed_BTC, after = mixer.run(hidden_states[0, rows_BT], before)
            self._pool.write(layer, slots_B, after)
            mixed_1NC[0, rows_BT] = mixed_BTC
        return mixed_1NC

    def _decode(self, layer: int, hidden_NC: torch.Tensor, mixed_NC: torch.Tensor) -> None:
        """Compute the rows that decode. The first slots' states, which most steps need, are not copied."""
        assert self._decoding is not None
        mixer, count = self._mixers[layer], len(self._decoding)
        if self._are_first:
            mixed_NC[:count] = mixer.step(hidden_NC[:count].unsqueeze(1), self._pool.first(layer, count)).squeeze(1)
            return
        states = self._pool.read(layer, self._decoding)
        mixed_NC[self._decoding] = mixer.step(hidden_NC[self._decoding].unsqueeze(1), states).squeeze(1)
        self._pool.write(layer, self._decoding, states)


def pieces(segments: Sequence[SlotSegment], chunk: int) -> list[Piece]:
    """Cut segments into pieces, those of one segment in their order: not at all, or into powers of two, so that
    segments of different lengths share calls. Pieces shorter than `chunk` cost as much as a whole one: with the scan of
    Mamba 2 the powers of two are hardly ever worth it, with a convolution they are from few segments on."""
    return min(_whole(segments), _powers_of_two(segments), key=lambda cut: sum(_cost(piece, chunk) for piece in cut))


def _cost(piece: Piece, chunk: int) -> int:
    length = piece.length if piece.length == 1 else -(-piece.length // chunk) * chunk
    return _CALL_TOKENS + len(piece.slots) * length


def _whole(segments: Sequence[SlotSegment]) -> list[Piece]:
    lengths = [segment.end - segment.start for segment in segments]
    return [
        _piece([(segment, 0) for segment, length in zip(segments, lengths, strict=True) if length == common], common)
        for common in sorted(set(lengths))
    ]


def _powers_of_two(segments: Sequence[SlotSegment]) -> list[Piece]:
    lengths = [segment.end - segment.start for segment in segments]
    bits = functools.reduce(int.__or__, lengths, 0)
    powers = [1 << bit for bit in reversed(range(bits.bit_length())) if bits >> bit & 1]
    return [
        _piece(
            [
                (segment, length // (2 * power) * (2 * power))
                for segment, length in zip(segments, lengths, strict=True)
                if length & power
            ],
            power,
        )
        for power in powers
    ]


def single_pieces(segments: Sequence[SlotSegment]) -> list[Piece]:
    """Cut segments for a layer that computes several tokens only from the beginning: those that go on, token by
    token."""
    beginning = [segment for segment in segments if segment.start == 0]
    later = [segment for segment in segments if segment.start]
    whole = [_piece([(segment, 0)], segment.end) for segment in beginning]
    longest = max((segment.end - segment.start for segment in later), default=0)
    return whole + [
        _piece([(segment, offset) for segment in later if segment.start + offset < segment.end], 1)
        for offset in range(longest)
    ]


def _piece(members: Sequence[tuple[SlotSegment, int]], length: int) -> Piece:
    """Return a piece of `length` rows of each segment, from an offset in it on."""
    return Piece(
        slots=tuple(segment.slot for segment, _ in members),
        first_rows=tuple(segment.first_row + offset for segment, offset in members),
        length=length,
    )
