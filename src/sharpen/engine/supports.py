"""The support of each token that was sampled with `top_p`, `top_k` or `min_p`: the ids that it was drawn from.

In: log-distributions that are -inf elsewhere. Out: `Supports`, and masks of them as a constraint's are
(`token_masks`). A support is stored as the differences of its sorted ids, or as one bit per id if that takes fewer
bytes: an eighth of the vocabulary at most.

Shape suffixes: R rows, S sampled tokens of a response, V vocabulary, B bytes of a bit mask, W words (32 bits) of a
mask, K ids of a support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sharpen.engine.token_masks import MaskArray
from sharpen.errors import SamplingError
from sharpen.types import Supports

ByteArray = npt.NDArray[np.uint8]

_BITS = 7
"""How many bits of a difference are in a byte; the highest bit says whether more follow (LEB128)."""


def kept_bits(log_distribution_RV: torch.Tensor) -> ByteArray:
    """Return which ids have a probability, shape (R, B): bit i % 8 of byte i // 8. It is packed on the device, so that
    an eighth of a byte is copied for an id."""
    kept_RV = torch.nn.functional.pad(log_distribution_RV > -torch.inf, (0, -log_distribution_RV.shape[1] % 8))
    bits = torch.arange(8, dtype=torch.uint8, device=kept_RV.device)
    bytes_RB = (kept_RV.view(len(kept_RV), -1, 8).to(torch.uint8) << bits).sum(dim=-1, dtype=torch.uint8)
    found: ByteArray = bytes_RB.cpu().numpy()
    return found


def packed(bits_B: ByteArray) -> bytes:
    """Return one support in its shorter form."""
    ids_K = np.flatnonzero(np.unpackbits(bits_B, bitorder="little"))
    differences_K = np.diff(ids_K, prepend=0)
    if len(ids_K) >= len(bits_B):
        return bits_B.tobytes()
    short = _to_leb128(differences_K)
    return short if len(short) < len(bits_B) else bits_B.tobytes()


def joined(parts: Sequence[bytes], vocab_size: int) -> Supports:
    """Return the packed supports of a response's tokens together."""
    sizes_S = np.array([len(part) for part in parts], np.int32)
    return Supports(vocab_size=vocab_size, sizes_S=sizes_S, packed=b"".join(parts))


def masks_of(supports: Supports, ids_S: npt.NDArray[np.integer[Any]]) -> MaskArray:
    """Return the masks of the tokens `ids_S`, shape (S, W). Raises `SamplingError` for what `joined` never returns,
    and for a token that is not in its own support."""
    num_bytes = -(-supports.vocab_size // 8)
    if len(supports.sizes_S) != len(ids_S) or int(supports.sizes_S.sum()) != len(supports.packed):
        raise SamplingError(f"{len(supports.sizes_S)} supports are recorded for {len(ids_S)} tokens, or parts of them")
    masks_SB = np.zeros((len(ids_S), -(-num_bytes // 4) * 4), np.uint8)
    ends_S = np.cumsum(supports.sizes_S)
    for place, (size, end) in enumerate(zip(supports.sizes_S.tolist(), ends_S.tolist(), strict=True)):
        own = np.frombuffer(supports.packed, np.uint8, size, end - size)
        if size == num_bytes:
            masks_SB[place, :size] = own
            continue
        kept_K = np.cumsum(_from_leb128(own))
        if len(kept_K) and kept_K[-1] >= supports.vocab_size:
            raise SamplingError(f"the support of token {place} has the id {kept_K[-1]}, beyond the vocabulary")
        np.bitwise_or.at(masks_SB[place], kept_K // 8, (1 << kept_K % 8).astype(np.uint8))
    inside_S = (ids_S >= 0) & (ids_S < supports.vocab_size)
    inside_S &= masks_SB[np.arange(len(ids_S)), np.where(inside_S, ids_S, 0) // 8] >> (ids_S % 8) & 1 == 1
    if not inside_S.all():
        first = int(np.argmin(inside_S))
        raise SamplingError(f"token {first} (id {int(ids_S[first])}) is not in its own support")
    return masks_SB.view("<i4").astype(np.int32, copy=False)


def _to_leb128(numbers_K: npt.NDArray[np.int64]) -> bytes:
    """Return numbers below 2**28 as LEB128: seven bits a byte, the lowest first."""
    at = np.arange(4) * _BITS
    bytes_K4 = (numbers_K[:, None] >> at) & 0x7F
    used_K4 = (numbers_K[:, None] >> at > 0) | (at == 0)
    more_K4 = np.pad(used_K4[:, 1:], ((0, 0), (0, 1)))
    found: ByteArray = (bytes_K4 | more_K4 << _BITS)[used_K4].astype(np.uint8)
    return found.tobytes()


def _from_leb128(own: ByteArray) -> npt.NDArray[np.int64]:
    """Return the numbers again. Raises `SamplingError` if the last one is cut off or one is too long."""
    lasts = np.flatnonzero(own < 0x80)
    firsts = np.concatenate([[0], lasts[:-1] + 1]) if len(lasts) else lasts
    if not len(lasts) or lasts[-1] != len(own) - 1 or (lasts - firsts).max() > 3:
        raise SamplingError("a recorded support is damaged")
    place = np.arange(len(own)) - np.repeat(firsts, lasts - firsts + 1)
    numbers: npt.NDArray[np.int64] = np.add.reduceat((own & 0x7F).astype(np.int64) << place * _BITS, firsts)
    return numbers
