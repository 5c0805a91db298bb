"""Takes the advantage of single tokens away by what training on them does to the entropy, where the algorithm asks.

In: all packs of a step with their advantages, and the policy before the step's first update. Out: the same packs, where
some entries have the advantage 0, and how many. It costs one forward pass over the step's tokens, since what a token
counts depends on all others. A token without advantage stays in the normalization of the loss and in its KL term.

Shape suffixes: S loss tokens of a step, E loss entries of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sharpen.algorithm.clip_entropy import mean_discriminator
from sharpen.algorithm.presets import Algorithm
from sharpen.trainer.model import TrainedModel
from sharpen.trainer.packing import Pack
from sharpen.trainer.scores import PackScores
from sharpen.trainer.team import IDLE, Team
from sharpen.trainer.work import Part


def clip_by_entropy(parts: Sequence[Part], policy: TrainedModel, algorithm: Algorithm, team: Team) -> dict[str, float]:
    """Set advantages to 0 where the algorithm says so. Returns metrics: the share of tokens that lost theirs, of all
    tokens and of those with a negative one."""
    if not algorithm.clips_by_entropy or not parts:
        return {}

    def score(pack: Pack) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _columns(policy.score(pack, statistic=mean_discriminator))

    with torch.no_grad():
        found = team.map(parts, lambda part: score(part.pack), lambda: score(IDLE))
    logprobs_S, entropy_S, means_S = (np.concatenate(column) for column in zip(*found, strict=True))
    advantages_S = np.concatenate([part.pack.advantages_E for part in parts])
    kept_S = algorithm.keeps_advantage(advantages_S.astype(np.float64), logprobs_S, entropy_S, means_S)
    lengths = np.cumsum([part.pack.num_trained_tokens for part in parts])[:-1]
    for part, advantages_E in zip(parts, np.split(np.where(kept_S, advantages_S, 0.0), lengths), strict=True):
        part.pack = replace(part.pack, advantages_E=advantages_E.astype(np.float32))
    num_negative = max(int((advantages_S < 0).sum()), 1)
    return {
        "entropy_clip_fraction": float((~kept_S).mean()),
        "entropy_clip_fraction_negative": float((~kept_S).sum()) / num_negative,
    }


def _columns(scores: PackScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logprob, entropy and mean discriminator of a pack's entries."""
    assert scores.statistic_E is not None
    columns = (scores.logprobs_E, scores.entropy_E, scores.statistic_E)
    first, second, third = (column.double().cpu().numpy() for column in columns)
    return first, second, third
