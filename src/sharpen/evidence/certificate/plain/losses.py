"""The losses of tokens, implemented a second time: each written out from its source, to repeat an update.

In: for the tokens of one sequence (shape S) their logprobs now, those they are compared with, and their advantages.
Out: the loss of each token. Nothing is shared with `algorithm.losses` and `algorithm.kl`; the sources are those of
`docs/reference/algorithms.md`. Gradients are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sharpen.config.run import KLS, ExpertConfig, RunConfig
from sharpen.evidence.certificate.brought import second_of
from sharpen.evidence.certificate.plain.loss_rules import LossRules

Tensor = torch.Tensor

_WIDEST = 20.0
"""Log ratios beyond this count as this."""


def _narrow(log_S: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(log_S, torch.full_like(log_S, -_WIDEST)), torch.full_like(log_S, _WIDEST))


def _ratio(now_S: Tensor, old_S: Tensor) -> Tensor:
    return torch.exp(_narrow(now_S - old_S))


def _constant(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _surrogate(ratio_S: Tensor, advantage_S: Tensor, low: float, high: float, dual: float) -> Tensor:
    """The clipped surrogate objective, negated; for a negative advantage no less than `dual` times it (0: no bound)."""
    objective_S = torch.minimum(ratio_S * advantage_S, ratio_S.clip(1.0 - low, 1.0 + high) * advantage_S)
    if dual:
        bounded_S = torch.maximum(objective_S, dual * advantage_S)
        objective_S = torch.where(advantage_S < 0, bounded_S, objective_S)
    return -objective_S


def _ppo(
    now_S: Tensor,
    old_S: Tensor,
    advantage_S: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0,
) -> Tensor:
    return _surrogate(_ratio(now_S, old_S), advantage_S, clip_low, clip_high, dual_clip)


def _gspo(now_S: Tensor, old_S: Tensor, advantage_S: Tensor, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    of_call = _narrow(_constant(now_S - old_S).mean())
    return _surrogate(torch.exp(of_call + now_S - _constant(now_S)), advantage_S, clip_low, clip_high, 0)


def _cispo(now_S: Tensor, old_S: Tensor, advantage_S: Tensor, clip_low: float = 1.0, clip_high: float = 0.28) -> Tensor:
    return -_constant(_ratio(now_S, old_S)).clip(1.0 - clip_low, 1.0 + clip_high) * advantage_S * now_S


def _gate(ratio_S: Tensor, advantage_S: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    tau_S = tau_neg + (tau_pos - tau_neg) * (advantage_S > 0)
    return 4.0 / tau_S / (1.0 + torch.exp(-tau_S * (ratio_S - 1.0)))


def _sapo(now_S: Tensor, old_S: Tensor, advantage_S: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    return -_gate(_ratio(now_S, old_S), advantage_S, tau_pos, tau_neg) * advantage_S


def _sapo_gate(
    now_S: Tensor, old_S: Tensor, advantage_S: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Tensor:
    return -_gate(_constant(_ratio(now_S, old_S)), advantage_S, tau_pos, tau_neg) * advantage_S * now_S


def _topr(now_S: Tensor, old_S: Tensor, advantage_S: Tensor, threshold: float = 0.0) -> Tensor:
    tapered_S = _constant(_ratio(now_S, old_S)).clip(max=1.0)
    return -advantage_S * torch.where(advantage_S > threshold, 1.0, tapered_S) * now_S


def _opmd(now_S: Tensor, old_S: Tensor, advantage_S: Tensor, tau: float = 1.0) -> Tensor:
    return -advantage_S / (1.0 + tau) * now_S


def _imitate(now_S: Tensor, old_S: Tensor, advantage_S: Tensor) -> Tensor:
    return -advantage_S * now_S


def _weighted(now_S: Tensor, old_S: Tensor, advantage_S: Tensor) -> Tensor:
    return -advantage_S * _ratio(now_S, old_S)


def _m2po(now_S: Tensor, old_S: Tensor, advantage_S: Tensor, threshold: float = 0.04) -> Tensor:
    """Of the tokens that `left_out_by_moment` keeps: the gradient is `-A ρ ∇log π`, with ρ bounded."""
    return -advantage_S * _constant(_ratio(now_S, old_S)) * now_S


def _dppo_tv(
    now_S: Tensor, old_S: Tensor, advantage_S: Tensor, low: float = 0.15, high: float = 0.15, max_ratio: float = 20.0
) -> Tensor:
    gained_S = torch.exp(_constant(now_S)) - torch.exp(old_S)
    kept_S = torch.where(advantage_S > 0, gained_S <= high, gained_S >= -low)
    return -advantage_S * kept_S * _constant(_ratio(now_S, old_S)).clip(max=max_ratio) * now_S


def _dppo_kl(
    now_S: Tensor, old_S: Tensor, advantage_S: Tensor, low: float = 0.05, high: float = 0.05, max_ratio: float = 20.0
) -> Tensor:
    new_S, before_S = torch.exp(_constant(now_S)), torch.exp(old_S)
    rest = torch.log(1.0 - before_S + 1e-8) - torch.log(1.0 - new_S + 1e-8)
    divergence_S = before_S * (old_S - _constant(now_S)) + (1.0 - before_S) * rest
    raised_S = (divergence_S <= high) | (new_S <= before_S)
    lowered_S = (divergence_S <= low) | (new_S >= before_S)
    kept_S = torch.where(advantage_S > 0, raised_S, lowered_S)
    return -advantage_S * kept_S * _constant(_ratio(now_S, old_S)).clip(max=max_ratio) * now_S


def _vespo(
    now_S: Tensor,
    old_S: Tensor,
    advantage_S: Tensor,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    of_call = torch.exp(torch.clamp(_narrow(_constant(now_S - old_S)).sum(), math.log(1e-8), _WIDEST))
    pulled = of_call**k_pos * torch.exp(lambda_pos - lambda_pos * of_call)
    pushed = of_call**k_neg * torch.exp(lambda_neg - lambda_neg * of_call)
    return -torch.where(advantage_S >= 0, pulled, pushed) * advantage_S * now_S


def _sppo(now_S: Tensor, old_S: Tensor, advantage_S: Tensor, epsilon: float = 0.3) -> Tensor:
    ratio_S = _constant(_ratio(now_S, old_S))
    inside_S = (ratio_S >= 1.0 / (1.0 + epsilon)) & (ratio_S <= 1.0 + epsilon)
    return -advantage_S * (now_S - old_S) * inside_S


def _rec(
    now_S: Tensor,
    old_S: Tensor,
    advantage_S: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip: str = "one-side",
    importance: bool = False,
) -> Tensor:
    ratio_S = _constant(_ratio(now_S, old_S))
    above_S, below_S = ratio_S > 1.0 + clip_high, ratio_S < 1.0 - clip_low
    kept_S = ~(above_S | below_S)
    if clip == "one-side":
        kept_S = ~((above_S & (advantage_S > 0)) | (below_S & (advantage_S < 0)))
    elif clip == "none":
        kept_S = torch.ones_like(above_S)
    return -advantage_S * (ratio_S if importance else 1.0) * now_S * kept_S


POLICY_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "sapo_gate": _sapo_gate,
    "topr": _topr,
    "opmd": _opmd,
    "reinforce": _imitate,
    "sft": _imitate,
    "importance_sampling": _weighted,
    "m2po": _m2po,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "vespo": _vespo,
    "sppo": _sppo,
    "rec": _rec,
}
"""The losses, by their names in the configuration."""


def policy_loss(rules: LossRules) -> Callable[..., Tensor]:
    """Return the loss that the rules name: ours, or the second formula of one that the user brings."""
    return POLICY_LOSSES.get(rules.policy_loss) or _second("policy_loss", rules.policy_loss)


def _second(part: str, name: str) -> Callable[..., Tensor]:
    second = second_of(part, name)
    assert second is not None, f"{name} has no second formula: its updates cannot be repeated"
    return second


def left_out_by_moment(pairs: Sequence[tuple[Tensor, Tensor]], threshold: float = 0.04) -> list[Tensor]:
    """Decide which tokens of an update M2PO leaves out: of those that are pushed on (advantage and log ratio have the
    same sign), the largest squared log ratios, until the mean of the others is at most `threshold`. In: advantages and
    log ratios of each call (S). Out: for each call, which of its tokens are left out (S)."""
    pushed = [
        (log**2, call, token)
        for call, (advantages_S, logs_S) in enumerate(pairs)
        for token, (advantage, log) in enumerate(zip(advantages_S.tolist(), logs_S.tolist(), strict=True))
        if advantage * log > 0
    ]
    pushed.sort(key=lambda one: one[0])
    total, kept = 0.0, 0
    for count, (square, _, _) in enumerate(pushed, 1):
        total += square
        if total / count <= threshold:
            kept = count
    left_out = [torch.zeros(len(log_S), dtype=torch.bool) for _, log_S in pairs]
    for _, call, token in pushed[kept:]:
        left_out[call][token] = True
    return left_out


def divergence(rules: LossRules, now_S: Tensor, reference_S: Tensor, old_S: Tensor) -> Tensor:
    """Estimate the divergence from the reference for each token."""
    if rules.kl not in KLS:
        return _second("kl", rules.kl)(now_S, reference_S, old_S)
    apart_S = now_S - reference_S
    narrow_S = _narrow(apart_S)
    if rules.kl == "k1":
        return apart_S
    if rules.kl == "k2":
        return apart_S**2 / 2
    if rules.kl == "abs":
        return apart_S.abs()
    k3_S = torch.exp(-narrow_S) - 1.0 + narrow_S
    if rules.kl == "low_var_kl":
        return torch.minimum(k3_S, torch.full_like(k3_S, 10.0))
    return k3_S * _ratio(now_S, old_S) if rules.kl == "corrected_k3" else k3_S


def behaviour_weight(rules: LossRules, proximal_S: Tensor, recorded_S: Tensor) -> Tensor:
    """Weight each token by how likely the weights before the step were to sample it, as against what did."""
    ratio_S = _ratio(proximal_S, recorded_S)
    low, high = rules.behaviour_low or 0.0, float("inf") if rules.behaviour_high is None else rules.behaviour_high
    if rules.behaviour == "unweighted":
        return torch.ones_like(ratio_S)
    if rules.behaviour == "truncated":
        return ratio_S.clip(max=high)
    if rules.behaviour == "masked":
        return ratio_S * ((ratio_S >= low) & (ratio_S <= high))
    return ratio_S


def kept_in_sequence(rules: LossRules, now_S: Tensor, recorded_S: Tensor, advantage_S: Tensor) -> Tensor:
    """Return 1 for the tokens of a sequence that count, 0 for those with a negative advantage if the sequence's mean
    divergence from its record is above the bound."""
    ones_S = torch.ones_like(advantage_S)
    if rules.sequence_mask is None or float(_constant(recorded_S - now_S).mean()) <= rules.sequence_mask:
        return ones_S
    return ones_S * (advantage_S >= 0)


def adapted_coefficient(coefficient: float, measured: float, target: float, horizon: int, num_rollouts: int) -> float:
    """Return the KL coefficient of the next step: a proportional controller whose error is cut at 0.2."""
    error = max(-0.2, min(0.2, measured / target - 1.0))
    return coefficient + coefficient * error * min(1.0, num_rollouts / horizon)


# The loss of an expert's rows beside rollouts, a second time, to repeat an update.
#
# In: a run's settings, the number of a step, logprobs of the expert's tokens. Out: what the two losses count, and the
# loss of each token. Written out from CHORD (arXiv 2508.11408) and `docs/use/beyond-rl.md`; nothing is shared with
# `algorithm.expert`.
#
# Shape suffix: S tokens of a sequence with loss.

PHI: Mapping[str, bool] = {"mix": False, "mix_chord": True}
"""The algorithms with an expert, and whether they weigh its tokens unless set otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoss:
    """The loss of an update is `(1 - mu)` times the policy loss and `mu` times the expert's. `phi`: a token counts
    p (1 - p)."""

    mu: float
    phi: bool

    @classmethod
    def of(cls, config: RunConfig, step: int) -> ExpertLoss | None:
        """Return what a run's settings define for a step (from 1), None without an expert."""
        usual, phi = PHI.get(config.algorithm.algorithm_type), config.expert.phi
        return None if usual is None else cls(mu=_mu(config.expert, step), phi=usual if phi is None else phi)

    def losses(self, logprobs_S: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token (S)."""
        p_S = torch.exp(logprobs_S.detach())
        return -self.mu * (p_S * (1.0 - p_S) if self.phi else 1.0) * logprobs_S


def _mu(settings: ExpertConfig, step: int) -> float:
    """Linearly up to `mu`, then along half a cosine down to `mu_valley`."""
    peak, warmup = 0.1 if settings.mu is None else settings.mu, settings.mu_warmup_steps or 0
    if step < warmup:
        return peak * step / warmup
    if settings.mu_valley is None or settings.mu_decay_steps is None:
        return peak
    done = 1.0 if settings.mu_decay_steps == 0 else min(1.0, (step - warmup) / settings.mu_decay_steps)
    return settings.mu_valley + (peak - settings.mu_valley) * (1.0 + math.cos(math.pi * done)) / 2.0
