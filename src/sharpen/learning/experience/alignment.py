"""Where two tokenizations of one text meet.

In: the bytes of each token, of both. Out: for each token the number of its chunk: the smallest pieces of the text that
begin and end between tokens of both. A place within a character is none where they meet: the bytes of a character are
no text by themselves.

Sources: the chunks of ALM, arXiv 2503.20083; arXiv 2606.09456 does the same for on-policy distillation.

Shape suffixes: S tokens of one, R tokens of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sharpen.types import IntArray


def chunks(one: Sequence[bytes], other: Sequence[bytes]) -> tuple[IntArray, IntArray]:
    """Return the chunk of each token of the one (S) and of the other (R) tokenization of a text, counted from 0. Every
    chunk has tokens of both. Both must spell the same bytes."""
    text = b"".join(one)
    assert text == b"".join(other), "both are tokens of one text"
    ends_S, ends_R = _ends(one), _ends(other)
    shared = np.intersect1d(ends_S, ends_R)
    within = np.array([_is_within(text, int(end)) for end in shared], np.bool_)
    shared = shared[~within]
    return (
        np.searchsorted(shared, ends_S).astype(np.int32),
        np.searchsorted(shared, ends_R).astype(np.int32),
    )


def _ends(pieces: Sequence[bytes]) -> npt.NDArray[np.int64]:
    return np.cumsum([len(piece) for piece in pieces], dtype=np.int64)


def _is_within(text: bytes, place: int) -> bool:
    """Whether a place in UTF-8 is within a character: what follows is one of its later bytes."""
    return place < len(text) and text[place] & 0xC0 == 0x80
