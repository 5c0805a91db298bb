"""Sets the advantage of tokens to 0 depending on how training on them changes the entropy (`clipb`, `clipv`).

In: all packs of a step with their advantages, and the policy before the step's first update. Out: the same packs, with
advantage 0 for some entries, and metrics. It costs one forward pass over all tokens of the step, because the threshold
depends on all of them. A clipped token still counts in the normalization of the loss and in the KL term.

Shape suffixes: S loss tokens of a step, E loss entries of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sharpen.learning.algorithm.clip_entropy import mean_discriminator
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.scores import PackScores
from sharpen.learning.trainer.team import IDLE, Team
from sharpen.learning.trainer.work import Part


def clip_by_entropy(parts: Sequence[Part], policy: TrainedModel, algorithm: Algorithm, team: Team) -> dict[str, float]:
    """Set the advantages of clipped tokens to 0. Return metrics: the number of clipped tokens relative to all tokens,
    and relative to those with a negative advantage."""
    if not algorithm.clips_by_entropy or not parts:
        return {}

    def score(pack: Pack) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _columns(policy.score(pack, statistic=mean_discriminator))

    with torch.no_grad():
        scores = team.map(parts, lambda part: score(part.pack), lambda: score(IDLE))
    logprobs_S, entropy_S, means_S = (np.concatenate(column) for column in zip(*scores, strict=True))
    advantages_S = np.concatenate([part.pack.advantages_E for part in parts])
    kept_S = algorithm.keeps_advantage(advantages_S.astype(np.float64), logprobs_S, entropy_S, means_S)
    ends = np.cumsum([part.pack.num_trained_tokens for part in parts])[:-1]
    kept = zip(parts, np.split(np.where(kept_S, advantages_S, 0.0), ends), np.split(kept_S, ends), strict=True)
    for part, advantages_E, kept_E in kept:
        part.pack = replace(part.pack, advantages_E=advantages_E.astype(np.float32))
        part.left_out_E = part.left_out_with(~kept_E)
    num_negative = max(int((advantages_S < 0).sum()), 1)
    return {
        "entropy_clip_fraction": float((~kept_S).mean()),
        "entropy_clip_fraction_negative": float((~kept_S).sum()) / num_negative,
    }


def _columns(scores: PackScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logprob, entropy and mean discriminator of a pack's entries."""
    assert scores.statistic_E is not None
    columns = (scores.logprobs_E, scores.entropy_E, scores.statistic_E)
    first, second, third = (column.double().cpu().numpy() for column in columns)
    return first, second, third
