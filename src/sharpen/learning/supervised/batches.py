"""Makes the batch of an update from lessons: splits them into updates and sets the weights of tokens.

In: lessons, an algorithm. Out: experiences with weights that are normalized over the whole update, so that splitting
into micro-batches does not change the gradient.

Shape suffixes: T tokens of all sequences, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from sharpen.learning.algorithm.aggregation import token_weights
from sharpen.learning.algorithm.supervised import SupervisedAlgorithm
from sharpen.learning.supervised.lessons import Lesson
from sharpen.types import Experience


def split(lessons: Sequence[Lesson], num_parts: int) -> list[Sequence[Lesson]]:
    """Split lessons into up to `num_parts` parts of nearly equal size, none of them empty."""
    bounds = [len(lessons) * part // num_parts for part in range(num_parts + 1)]
    parts = [lessons[start:stop] for start, stop in pairwise(bounds)]
    return [part for part in parts if part]


def weighted(lessons: Sequence[Lesson], algorithm: SupervisedAlgorithm) -> tuple[Experience, ...]:
    """Return the sequences of one update's lessons, with token weights."""
    numbered = [(number, one) for number, lesson in enumerate(lessons) for one in lesson.experiences]
    if not numbered:
        return ()
    lengths = [len(experience.ids_T) for _, experience in numbered]
    mask_T = np.concatenate([experience.loss_mask_T for _, experience in numbered])
    calls_T = np.concatenate([experience.calls_T for _, experience in numbered]).astype(np.int64)
    rollouts_T = np.repeat([number for number, _ in numbered], lengths)
    # Turns of different rows, and of the two sides of a pair, get different numbers.
    sides_T = np.concatenate([experience.advantages_T < 0 for _, experience in numbered])
    calls_T = (rollouts_T * 2 + sides_T) * (int(calls_T.max()) + 1) + calls_T
    weights_T = np.zeros(len(mask_T), np.float32)
    weights_T[mask_T] = token_weights(
        algorithm.aggregation, rollouts_T[mask_T], calls_T[mask_T], length=algorithm.constant_length
    )
    parts = np.split(weights_T, np.cumsum(lengths)[:-1])
    return tuple(replace(one, weights_T=part) for (_, one), part in zip(numbered, parts, strict=True))
