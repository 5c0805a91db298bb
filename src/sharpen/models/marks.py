"""Where images lie among the tokens of a sequence, and a name for each, since all images have the same token ids.

In: ids and `PictureSpan`s. Out: marked ids, by which beginnings are compared, and `Shown`, which says what tokens stand
for a picture. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sharpen.models.pieces import text_config
from sharpen.types import IntArray, Picture, PictureSpan

IndexArray = npt.NDArray[np.int64]
BothWays = Literal["", "everywhere", "in windows"]
"""Where the tokens of an image attend to later ones of the same image too: nowhere, in all layers, or in those with a
sliding window."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shown:
    """A picture among the computed tokens of a pass: `rows_N` are its image tokens, in their order. The tokens after it
    that see it, those of all branches, end before `stop`."""

    picture: Picture
    rows_N: IndexArray
    stop: int


class Marks:
    """Gives each picture a negative number, which takes the place of its image tokens' id wherever two sequences are
    compared. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}

    def marked(self, ids_T: IntArray, spans: Iterable[PictureSpan]) -> IntArray:
        """Return a copy of the ids with the image tokens marked; the ids themselves if there are no images."""
        spans = tuple(spans)
        if not spans:
            return ids_T
        marked_T = ids_T.copy()
        for span in spans:
            marked_T[image_tokens(ids_T, span)] = self._number(span.picture)
        return marked_T

    def _number(self, picture: Picture) -> int:
        with self._lock:
            return self._numbers.setdefault(picture.sha256, -1 - len(self._numbers))


def image_tokens(ids_T: IntArray, span: PictureSpan) -> IndexArray:
    """Return the positions of a picture's image tokens."""
    within = ids_T[span.start : span.stop]
    found: IndexArray = span.start + np.flatnonzero(within == within[:1])
    return found


def both_ways(config: Any) -> BothWays:
    """Return where the image tokens of a model of this configuration attend both ways."""
    if config.model_type == "gemma3":
        return "everywhere"
    bidirectional = getattr(text_config(config), "use_bidirectional_attention", None)
    return "in windows" if config.model_type == "gemma4" and bidirectional == "vision" else ""
