"""On-policy distillation: the divergence of the policy from a teacher, token by token, and its settings.

In: logprobs of policy and teacher over the vocabulary, at states that the policy reached itself. Out: a divergence for
each state, differentiable with respect to the policy. The form `reverse_sampled` uses only the sampled token and turns
it into an advantage instead (`sampled_advantages`).

No gradient flows through the sampling of the states (as in GKD, arXiv 2306.13649).

Shape suffixes: E tokens that carry loss, R states, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sharpen.config.distill import DistillConfig, DistillDivergence
from sharpen.config.run import LossConfig, SamplingConfig
from sharpen.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    import torch

    from sharpen.types import Task

FORMULAS: Mapping[DistillDivergence, str] = {
    "reverse_sampled": "A + coef (log teacher - log π when sampled) of the sampled token",
    "forward": "coef KL(teacher || π) over the vocabulary",
    "reverse": "coef KL(π || teacher) over the vocabulary",
    "js": "coef (β KL(teacher || m) + (1 - β) KL(π || m)) over the vocabulary, m = β teacher + (1 - β) π",
}
"""Formulas of the divergences by their names in the configuration."""
_REWARD_SETTINGS = ("max_refill", "reward_low", "reward_high", "overlong_cache", "length_penalty", "turns_penalty")
_ADVANTAGE_SETTINGS = ("policy_loss", "policy_loss_args", "clip_low", "clip_high", "dual_clip", "behaviour")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill:
    """The distillation term of an algorithm: the divergence, its coefficient in the loss (or the advantage), and for
    `js` the teacher's weight β in the mixture, between 0 and 1. With several teachers, `teacher_key` is the field of a
    task that names one of `teachers`. With `own` the policy teaches itself, as it is or, with
    `own_decay`, as the moving average of its weights, of which each update keeps that part. `endpoint` is the
    teacher's name where it is behind one, whose logprobs come with the sampled tokens."""

    divergence: DistillDivergence
    coef: float = 1.0
    beta: float = 0.5
    teacher_key: str | None = None
    teachers: tuple[str, ...] = ()
    own: bool = False
    own_decay: float | None = None
    endpoint: str | None = None

    @property
    def of_vocabulary(self) -> bool:
        """Whether the divergence is over the vocabulary and a term of the loss, not over sampled tokens and an
        advantage."""
        return self.divergence != "reverse_sampled"

    def teacher_of(self, task: Task) -> str:
        """Return the name of a task's teacher, "" if there is one for all. Raises `DatasetError` for a task whose row
        names none of them."""
        if self.teacher_key is None:
            return ""
        name = task.row.get(self.teacher_key)
        if str(name) not in self.teachers:
            raise DatasetError(
                f"distill.teacher_key is {self.teacher_key!r}, and task {task.id} has {name!r} there, which is none of "
                f"distill.teachers ({', '.join(self.teachers)}): give it a teacher, or leave it out of the training set"
            )
        return str(name)

    def divergences(self, logprobs_RV: torch.Tensor, teacher_RV: torch.Tensor) -> torch.Tensor:
        """Return the divergence at each state (R, in nats, without `coef`); only if `of_vocabulary`."""
        if self.divergence == "forward":
            return kl(teacher_RV, logprobs_RV)
        if self.divergence == "reverse":
            return kl(logprobs_RV, teacher_RV)
        assert self.divergence == "js", f"{self.divergence} is not over the vocabulary"
        return jensen_shannon(logprobs_RV, teacher_RV, self.beta)


def kl(first_RV: torch.Tensor, second_RV: torch.Tensor) -> torch.Tensor:
    """Return KL(first || second) in nats of each row of logprobs, shape R."""
    return (first_RV.exp() * (first_RV - second_RV)).sum(dim=-1)


def jensen_shannon(logprobs_RV: torch.Tensor, teacher_RV: torch.Tensor, beta: float) -> torch.Tensor:
    """Return `β KL(teacher || m) + (1 - β) KL(policy || m)` with `m = β teacher + (1 - β) policy`, shape R.

    It is never negative and at most the entropy of (β, 1 - β). Divided by β, it approaches KL(teacher || policy) as β
    goes to 0; divided by 1 - β, it approaches KL(policy || teacher) as β goes to 1.

    Source: generalized JSD of GKD, arXiv 2306.13649, equation 1.
    """
    import torch

    mixture_RV = torch.logaddexp(teacher_RV + math.log(beta), logprobs_RV + math.log1p(-beta))
    return beta * kl(teacher_RV, mixture_RV) + (1.0 - beta) * kl(logprobs_RV, mixture_RV)


def sampled_advantages(distill: Distill, teacher_E: torch.Tensor, sampled_E: torch.Tensor) -> torch.Tensor:
    """Return `coef (log teacher - log π)` of each sampled token, with π as of sampling. The policy gradient with this
    advantage minimizes KL(π || teacher) at each state, ignoring later tokens (a discount of 0).

    Source: "On-Policy Distillation", Thinking Machines Lab, 2025; `on_policy_distill` of Trinity-RFT 0.6.0.
    """
    return distill.coef * (teacher_E - sampled_E)


def configured(name: str, preset: Distill | None, config: DistillConfig | None) -> Distill | None:
    """Apply the settings of `config` to the distillation term of a preset. Raises `ConfigError` for a setting without
    effect."""
    given: dict[str, Any] = {} if config is None else config.model_dump(exclude_none=True)
    given.pop("teacher_path", None)  # the algorithm is the same with any teacher
    given.pop("context", None)
    given.pop("teacher_url", None)
    given.pop("teacher_api_key_env", None)
    given["endpoint"] = given.pop("teacher_model", None)
    given["teachers"], given["own"] = tuple(given.pop("teachers", ())), given.pop("own_weights", None) == "current"
    if preset is None:
        if config is not None and config != DistillConfig():
            raise ConfigError(
                f"the settings of distill have no effect: {name!r} has no teacher (on_policy_distill and jsd have one)"
            )
        return None
    distill = replace(preset, **given)
    if "beta" in given and distill.divergence != "js":
        raise ConfigError(
            f"distill.beta is {distill.beta:g}, but distill.divergence is {distill.divergence!r}: only js has a "
            "mixture; leave it out"
        )
    if distill.endpoint is not None and distill.of_vocabulary:
        raise ConfigError(
            f"distill.teacher_url is set, and {name!r} compares whole distributions ({distill.divergence}): an "
            "endpoint gives only the logprobs of the sampled tokens; set distill.divergence to reverse_sampled, or "
            "take distill.teacher_path"
        )
    return distill


def check_without_rewards(
    name: str, advantage: object, distill: Distill | None, loss: LossConfig, sampling: SamplingConfig | None
) -> None:
    """Raise `ConfigError` for settings that have no effect in an algorithm that uses no rewards, or if it has no
    teacher either."""
    if distill is None and advantage == "none":
        raise ConfigError(
            f"loss.advantage is 'none', and {name!r} has no teacher: nothing would be learned. Choose another "
            "advantage, or the algorithm on_policy_distill or jsd"
        )
    unused: dict[str, Any] = {"loss.std_threshold": loss.std_threshold}
    if sampling is not None:
        unused |= {f"sampling.{setting}": getattr(sampling, setting) for setting in _REWARD_SETTINGS}
    if distill is not None and distill.of_vocabulary:
        unused |= {f"loss.{setting}": getattr(loss, setting) for setting in _ADVANTAGE_SETTINGS}
    origin = "from every rollout alike" if distill is None else "only from its teacher"
    for setting, value in unused.items():
        if value not in (None, {}, "none"):
            raise ConfigError(f"{setting} is {value}, but {name!r} learns {origin}, not from rewards: leave it out")
