"""Where two tokenizations of one text meet.

In: the bytes of the tokens of either. Out: the text, where tokens end in it, and for each token the number of its
chunk: the smallest pieces of the text that begin and end between tokens of both. A place within a character is none
where they meet: its bytes are no text by themselves. Bytes that never become text are U+FFFD, as agents read them, one
for all that follow each other; nor does a chunk end behind one, except at the end of the text.

Sources: the chunks of ALM, arXiv 2503.20083; arXiv 2606.09456 does the same for on-policy distillation.

Shape suffixes: S tokens of one, R tokens of the other.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sharpen.types import IntArray

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_RUN = re.compile(f"{UNREADABLE}+")
_NOWHERE = -1


def spelled(pieces: Sequence[bytes]) -> tuple[str, IntArray]:
    """Return the text of tokens, and for each the number of characters up to its end (S); -1 if no chunk can end
    there."""
    decoder, parts, last, length = codecs.getincrementaldecoder("utf-8")("replace"), list[str](), "", 0
    ends = []
    for piece in (*pieces, b""):
        new = _RUN.sub(UNREADABLE, decoder.decode(piece, final=not piece))
        new = new.removeprefix(UNREADABLE) if last == UNREADABLE else new
        parts.append(new)
        last, length = new[-1:] or last, length + len(new)
        ends.append(_NOWHERE if decoder.getstate()[0] or last == UNREADABLE else length)
    return "".join(parts), np.array([*ends[:-2], length][: len(pieces)], np.int32)


def chunks(one: IntArray, other: IntArray) -> tuple[IntArray, IntArray]:
    """Return the chunk of each token of the one (S) and of the other (R) tokenization of a text, counted from 0, by
    where they end in it. Every chunk has tokens of both."""
    shared = np.intersect1d(one, other)
    return _numbers(one, shared), _numbers(other, shared)


def _numbers(ends: IntArray, shared: npt.NDArray[np.int32]) -> IntArray:
    """Return for each token how many chunks end before it."""
    closes = np.isin(ends, shared) & (ends != _NOWHERE)
    numbers: IntArray = (np.cumsum(closes) - closes).astype(np.int32)
    return numbers
