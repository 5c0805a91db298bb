"""An algorithm of one's own: a rollout counts by how many of its group it beats, and the further a token's probability
has moved, the less it is pushed.

sharpen run --config run.yaml --set algorithm.algorithm_type=examples/extend/algorithm.py:RANKS
sharpen run --config run.yaml --set loss.advantage=examples/extend/algorithm.py:ranks
"""

import math
from typing import Any

import numpy as np
import torch

from sharpen.learning.algorithm.advantages import Advantage
from sharpen.learning.algorithm.losses import PolicyLoss
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.returns import Scores


def ranks(scores: Scores, *, power: float = 1.0) -> Any:
    """The share of the group that a rollout beats minus the share that beats it, whatever the rewards' scale."""
    apart_RR = np.sign(scores.rewards_R[:, None] - scores.rewards_R[None, :])
    same_RR = scores.groups_R[:, None] == scores.groups_R[None, :]
    ranks_R = (apart_RR * same_RR).sum(axis=1) / same_RR.sum(axis=1)
    return scores.per_call(np.sign(ranks_R) * np.abs(ranks_R) ** power)


def soft_wall(now_E: torch.Tensor, old_E: torch.Tensor, advantages_E: torch.Tensor, *, width: float = 0.2) -> Any:
    """-A width tanh(log ρ / width): the further a token has moved, the less it is pushed. None is cut off."""
    loss_E = -advantages_E * width * torch.tanh((now_E - old_E) / width)
    return loss_E, torch.zeros_like(loss_E, dtype=torch.bool)


def ranks_again(groups: Any, power: float = 1.0) -> list[list[float]]:
    """The advantage once more for the certificate, in plain Python: one number for each rollout of each group."""
    return [
        [
            math.copysign(abs(beats) ** power, beats)
            for one in members
            for beats in [sum((one.reward > x.reward) - (one.reward < x.reward) for x in members) / len(members)]
        ]
        for members in groups
    ]


def soft_wall_again(now_S: torch.Tensor, old_S: torch.Tensor, advantages_S: torch.Tensor, width: float = 0.2) -> Any:
    """The loss once more, of one call's tokens, written as a sigmoid."""
    return -advantages_S * width * (2.0 * torch.sigmoid(2.0 * (now_S - old_S) / width) - 1.0)


RANKS = Algorithm(
    name="ranks",
    advantage=Advantage(function=ranks, formula="share beaten - share that beats it", second=ranks_again),
    policy_loss=PolicyLoss(function=soft_wall, formula="-A w tanh(log ρ / w)", second=soft_wall_again),
    kl="k3",
    kl_coef=0.001,
    source="an example of docs/use/extending.md",
)
