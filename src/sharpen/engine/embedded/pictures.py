"""The images of the engine's jobs: from a request to the view of a step.

In: requests with pictures; then the rows that each step computes. Out: `View`s for the forward pass.

Shape suffixes: P prompt tokens, N rows of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpen.contracts import GenerateRequest
from sharpen.engine.requests import check_pictures
from sharpen.errors import ModelError, SamplingError
from sharpen.models.marks import IndexArray, Marks, Shown, both_ways, image_tokens
from sharpen.models.pieces import Piece, pieces_of
from sharpen.models.sight import Sight, View
from sharpen.types import IntArray, Picture


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobPictures:
    """The images of a prompt. `blocks` are the positions (first, end) of those whose tokens attend both ways, which are
    computed in one step. `places_3P` are the positions of its tokens in time, height and width; `shift` is what
    later tokens' are less than their places in the sequence (0 or below)."""

    ids_P: IntArray
    shown: tuple[Shown, ...]
    blocks: tuple[tuple[int, int], ...]
    places_3P: IndexArray | None
    shift: int

    def places(self, at_N: IndexArray) -> IndexArray:
        """Return the positions of the tokens at some places of the sequence, shape (3, N)."""
        places_3N = np.repeat(at_N[None] + self.shift, 3, axis=0)
        if self.places_3P is not None:
            within_N = at_N < self.places_3P.shape[1]
            places_3N[:, within_N] = self.places_3P[:, at_N[within_N]]
        return places_3N


class EnginePictures:
    """The images of all jobs of an engine."""

    def __init__(self, model: Any, *, deterministic: bool) -> None:
        """`model` is the engine's. Only one with a vision tower sees images."""
        self._deterministic = deterministic
        self._name = type(model).__name__
        self._sight = Sight(model) if Piece.VISION in pieces_of(model.config) else None
        self._marks = Marks()
        self.both_ways = both_ways(model.config)

    @property
    def image_token_id(self) -> int:
        """The id of the tokens that stand for images."""
        assert self._sight is not None
        return self._sight.eyes.image_token_id

    def forget(self) -> None:
        """Look at every picture anew: the model's weights are others now."""
        if self._sight is not None:
            self._sight.forget()

    def read(self, request: GenerateRequest) -> JobPictures | None:
        """Read the images of a request, on any thread; None if it has none. Raises `SamplingError` if the model sees no
        images, or if the request's are not where its ids say; `ImageError` if one cannot be read."""
        if not request.pictures:
            return None
        if self._sight is None:
            raise SamplingError(f"{self._name} sees no images, and the request has {len(request.pictures)}")
        try:
            eyes = self._sight.eyes
        except ModelError as error:
            raise SamplingError(str(error)) from error
        if self.both_ways and self._deterministic:
            raise SamplingError(
                f"the tokens of an image attend both ways in {self._name}, and the deterministic mode computes each by "
                "itself: set deterministic to false"
            )
        check_pictures(request, eyes, both_ways=bool(self.both_ways))
        ids_P = request.prompt_ids.astype(np.int32)
        shown = [
            Shown(picture=span.picture, rows_N=image_tokens(ids_P, span), stop=len(ids_P) + 1)
            for span in request.pictures
        ]
        places_3P, shift = None, 0
        if self._sight.has_places:
            places_3T = self._sight.positions(np.arange(len(ids_P) + 1), shown)
            places_3P, shift = places_3T[:, :-1], int(places_3T[0, -1]) - len(ids_P)
        return JobPictures(
            ids_P=self._marks.marked(ids_P, request.pictures),
            shown=tuple(shown),
            blocks=tuple((span.start, span.stop) for span in request.pictures) if self.both_ways else (),
            places_3P=places_3P,
            shift=shift,
        )

    def view(self, jobs: Mapping[int, JobPictures], slot_N: IndexArray, position_N: IndexArray) -> View | None:
        """Return the view of a step that computes these positions of slots; None if no slot's job has images. `jobs`
        are those with images, by slot."""
        if self._sight is None or not jobs:
            return None
        places_4N = np.repeat(position_N[None], 4, axis=0) if self._sight.has_places else None
        parts: list[tuple[Picture, IndexArray, IndexArray]] = []
        for slot, pictures in jobs.items():
            rows = np.flatnonzero(slot_N == slot)
            if places_4N is not None:
                places_4N[1:, rows] = pictures.places(position_N[rows])
            for one in pictures.shown:
                rows_of_it = rows[np.isin(position_N[rows], one.rows_N)]
                if len(rows_of_it):
                    which = np.searchsorted(one.rows_N, position_N[rows_of_it])
                    parts.append((one.picture, which, rows_of_it))
        return self._sight.view(parts, places_4N)
