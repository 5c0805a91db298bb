"""Per-token policy losses.

In: current logprobs of the sampled tokens, their logprobs when sampled, and advantages. Out: one loss per token, not
aggregated, and whether the token was clipped (then it has no gradient). If a source gives a gradient instead of a loss,
the loss here is one with that gradient.

Shape suffixes: E tokens that carry loss, C calls.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sharpen.errors import ConfigError
from sharpen.learning.algorithm.parts import PolicyLossFunction, named
from sharpen.learning.algorithm.second_moment import Kept, within_moment

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this magnitude, so that ratios cannot overflow."""

Losses: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Loss of each token (E), and whether it was clipped (E, bool)."""


def log_ratio(logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor) -> torch.Tensor:
    """Return the log of each token's probability ratio, clamped to ±`MAX_LOG_RATIO`."""
    return (logprobs_E - old_logprobs_E).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def call_log_ratio(logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, calls_E: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean log ratio over the tokens of its call, clamped, without gradient.

    `calls_E` has the number of each token's call, counting from 0 without gaps. All tokens of a call must be passed in
    one call of this function.
    """
    import torch

    ratios_E = (logprobs_E - old_logprobs_E).detach()
    num_calls = len(calls_E)  # an upper bound: reading the exact number would wait for the GPU
    sums_C = ratios_E.new_zeros(num_calls).index_add_(0, calls_E, ratios_E)
    sizes_C = ratios_E.new_zeros(num_calls).index_add_(0, calls_E, torch.ones_like(ratios_E))
    return (sums_C / sizes_C.clamp(min=1.0))[calls_E].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Losses:
    """Return `-min(ρ A, clamp(ρ, 1 - clip_low, 1 + clip_high) A)` with ratio ρ and advantage A: the clipped surrogate.

    If A < 0, `dual_clip` c > 1 limits the loss to `-c A`.

    Sources: PPO, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729.
    """
    ratio_E = log_ratio(logprobs_E, old_logprobs_E).exp()
    return _clipped(ratio_E, advantages_E, clip_low, clip_high, dual_clip)


def gspo(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    calls_E: torch.Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Losses:
    """Return `ppo_clip` with one ratio for all tokens of a call: the geometric mean of their ratios.

    The gradient of each token is that of its own logprob times this ratio (GSPO-token, which equals GSPO if all tokens
    of a call have the same advantage). Source: GSPO, arXiv 2507.18071, equations 5, 7 and 14; bounds: section 5.1.
    """
    call_ratio_E = call_log_ratio(logprobs_E, old_logprobs_E, calls_E)
    ratio_E = (call_ratio_E + logprobs_E - logprobs_E.detach()).exp()
    return _clipped(ratio_E, advantages_E, clip_low, clip_high, None)


def cispo(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> Losses:
    """Return `-clamp(ρ, 1 - clip_low, 1 + clip_high) A log π` without gradient through the clamped ratio, so that every
    token keeps a gradient.

    Source: CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5 (without a lower bound, and without a value for the
    upper one: 0.28 is the default of Trinity-RFT 0.6.0).
    """
    ratio_E = log_ratio(logprobs_E, old_logprobs_E).detach().exp()
    weight_E = ratio_E.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -advantages_E * weight_E * logprobs_E, _none(logprobs_E)


def sapo(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Losses:
    """Return `-(4 / τ) sigmoid(τ (ρ - 1)) A`, a soft gate instead of a clip; τ depends on the sign of the advantage.

    Its slope at ρ = 1 is that of `-ρ A`. Source: SAPO, arXiv 2511.20347. Trinity-RFT's `sapo` is `sapo_gate` here.
    """
    gate_E = _soft_gate(log_ratio(logprobs_E, old_logprobs_E).exp(), advantages_E, tau_pos, tau_neg)
    return -advantages_E * gate_E, _none(logprobs_E)


def sapo_gate(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Losses:
    """Return `-g A log π` with the gate `g = (4 / τ) sigmoid(τ (ρ - 1))` of `sapo`, without gradient through the gate.

    Its slope at ρ = 1 is 2 / τ times that of `-ρ A`, and increases with ρ. Source: `sapo` of Trinity-RFT 0.6.0.
    """
    ratio_E = log_ratio(logprobs_E, old_logprobs_E).detach().exp()
    gate_E = _soft_gate(ratio_E, advantages_E, tau_pos, tau_neg)
    return -advantages_E * gate_E * logprobs_E, _none(logprobs_E)


def _soft_gate(ratio_E: torch.Tensor, advantages_E: torch.Tensor, tau_pos: float, tau_neg: float) -> torch.Tensor:
    import torch

    tau_E = torch.full_like(ratio_E, tau_neg).masked_fill_(advantages_E > 0, tau_pos)
    return torch.sigmoid(tau_E * (ratio_E - 1.0)) * (4.0 / tau_E)


def topr(
    logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, advantages_E: torch.Tensor, *, threshold: float = 0.0
) -> Losses:
    """Return `-w A log π`. The weight w has no gradient: it is 1 if the advantage is above `threshold`, else
    `min(ρ, 1)`.

    Source: tapered off-policy REINFORCE, arXiv 2503.14286 (there per answer; here, as in Trinity-RFT 0.6.0, per token).
    """
    import torch

    tapered_E = log_ratio(logprobs_E, old_logprobs_E).detach().exp().clamp(max=1.0)
    weight_E = torch.where(advantages_E > threshold, torch.ones_like(tapered_E), tapered_E)
    return -advantages_E * weight_E * logprobs_E, _none(logprobs_E)


def opmd(
    logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, advantages_E: torch.Tensor, *, tau: float = 1.0
) -> Losses:
    """Return `-A log π / (1 + τ)`. Source: `opmd` of Trinity-RFT 0.6.0, after Kimi k1.5, arXiv 2501.12599, section
    2.3.2."""
    return -advantages_E * logprobs_E / (1.0 + tau), _none(logprobs_E)


def policy_gradient(logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, advantages_E: torch.Tensor) -> Losses:
    """Return `-A log π`. Source: R. Williams, 1992. With advantage 1, this is the loss of supervised fine-tuning."""
    return -advantages_E * logprobs_E, _none(logprobs_E)


def importance_sampling(logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, advantages_E: torch.Tensor) -> Losses:
    """Return `-ρ A`, the surrogate loss without a clip. Source: PPO, arXiv 1707.06347, equation 6."""
    return -advantages_E * log_ratio(logprobs_E, old_logprobs_E).exp(), _none(logprobs_E)


def m2po(logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, advantages_E: torch.Tensor) -> Losses:
    """Return `-ρ A`. Its value stays bounded (`MAX_LOG_RATIO`), its gradient is that without the bound. The tokens that
    `second_moment.within_moment` leaves out of the update have advantage 0. Source: M2PO, arXiv 2510.01161."""
    log_E = logprobs_E - old_logprobs_E
    bounded_E = log_ratio(logprobs_E, old_logprobs_E).detach() + log_E - log_E.detach()
    return -advantages_E * bounded_E.exp(), _none(logprobs_E)


def dppo_tv(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    *,
    low: float = 0.15,
    high: float = 0.15,
    max_ratio: float = 20.0,
) -> Losses:
    """Return `-min(ρ, max_ratio) A log π` without gradient through the ratio, and 0 for tokens that A pushes on
    although their probability has moved by more than a bound: up by `high` (A > 0), down by `low` (A < 0).

    The move is the total variation between the two policies if only the sampled token and its complement are told
    apart. Source: DPPO, arXiv 2602.04879 (Binary-TV); bounds and the limit of the ratio are those of its authors' code
    in verl (`dppo_tv`).
    """
    moved_E = logprobs_E.detach().exp() - old_logprobs_E.exp()
    outside_E = ((moved_E > high) & (advantages_E > 0)) | ((moved_E < -low) & (advantages_E < 0))
    return _within(outside_E, logprobs_E, old_logprobs_E, advantages_E, max_ratio)


def dppo_kl(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    *,
    low: float = 0.05,
    high: float = 0.05,
    max_ratio: float = 20.0,
) -> Losses:
    """Return `dppo_tv`, but bound the divergence `KL(old || now)`, in nats, of the sampled token and its complement.

    Source: DPPO, arXiv 2602.04879 (Binary-KL), and `dppo_kl` in verl, whose 1e-8 in the logarithm of both complements
    is here too.
    """
    now_E = logprobs_E.detach()
    p_E, old_p_E = now_E.exp(), old_logprobs_E.exp()
    others_E = (1.0 - old_p_E) * ((1.0 - old_p_E + 1e-8) / (1.0 - p_E + 1e-8)).log()
    apart_E = old_p_E * (old_logprobs_E - now_E) + others_E
    above_E = (apart_E > high) & (p_E > old_p_E) & (advantages_E > 0)
    below_E = (apart_E > low) & (p_E < old_p_E) & (advantages_E < 0)
    return _within(above_E | below_E, logprobs_E, old_logprobs_E, advantages_E, max_ratio)


def _within(
    outside_E: torch.Tensor,
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    max_ratio: float,
) -> Losses:
    weight_E = log_ratio(logprobs_E, old_logprobs_E).detach().exp().clamp(max=max_ratio)
    return (-advantages_E * weight_E * logprobs_E).masked_fill(outside_E, 0.0), outside_E


def vespo(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    calls_E: torch.Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Losses:
    """Return `-φ(W) A log π` with `φ(W) = W^k e^(λ (1 - W))`, without gradient through it: W is the ratio of the whole
    call, the product over its tokens, and k and λ depend on the sign of the advantage (0 counts as positive).

    log W is limited to `log 1e-8` and `MAX_LOG_RATIO`, as in its authors' code and TRL 1.16.0. Where φ is 0 in floating
    point, a token counts as clipped. Source: VESPO, arXiv 2602.10693; values of its experiments.
    """
    import torch

    log_E = log_ratio(logprobs_E, old_logprobs_E).detach()
    log_C = log_E.new_zeros(len(calls_E)).index_add_(0, calls_E, log_E)
    log_w_E = log_C[calls_E].clamp(math.log(1e-8), MAX_LOG_RATIO)
    k_E = torch.full_like(log_E, k_pos).masked_fill_(advantages_E < 0, k_neg)
    lambda_E = torch.full_like(log_E, lambda_pos).masked_fill_(advantages_E < 0, lambda_neg)
    weight_E = (lambda_E * (1.0 - log_w_E.exp()) + k_E * log_w_E).exp()
    return -advantages_E * weight_E * logprobs_E, weight_E == 0


def sppo(
    logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, advantages_E: torch.Tensor, *, epsilon: float = 0.3
) -> Losses:
    """Return `-A log ρ` if `1 / (1 + ε) <= ρ <= 1 + ε`, else 0. Source: `sppo` of Trinity-RFT 0.6.0."""
    import torch

    log_E = logprobs_E - old_logprobs_E
    ratio_E = log_ratio(logprobs_E, old_logprobs_E).detach().exp()
    outside_E = (ratio_E < 1.0 / (1.0 + epsilon)) | (ratio_E > 1.0 + epsilon)
    return torch.where(outside_E, torch.zeros_like(log_E), -advantages_E * log_E), outside_E


def rec(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip: Literal["one-side", "two-side", "none"] = "one-side",
    importance: bool = False,
) -> Losses:
    """Return `-A log π` if the ratio ρ is within bounds, else 0; with `importance`, multiply by ρ (without gradient).

    `one-side` limits ρ only in the direction in which the advantage pushes it. Source: REC, arXiv 2509.24203, section 4
    (REC-OneSide-NoIS and its variants).
    """
    import torch

    ratio_E = log_ratio(logprobs_E, old_logprobs_E).detach().exp()
    above_E, below_E = ratio_E > 1.0 + clip_high, ratio_E < 1.0 - clip_low
    if clip == "one-side":
        outside_E = (above_E & (advantages_E > 0)) | (below_E & (advantages_E < 0))
    else:
        outside_E = (above_E | below_E) if clip == "two-side" else _none(logprobs_E)
    weight_E = ratio_E if importance else torch.ones_like(ratio_E)
    loss_E = -advantages_E * weight_E * logprobs_E
    return torch.where(outside_E, torch.zeros_like(loss_E), loss_E), outside_E


def entropy(logits_EV: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of each row of logits (V: vocabulary), shape E. Divide by the temperature first."""
    import torch

    logprobs_EV = torch.log_softmax(logits_EV, dim=-1)
    return -(logprobs_EV.exp() * logprobs_EV.clamp(min=torch.finfo(logprobs_EV.dtype).min)).sum(dim=-1)


def value_loss(
    values_E: torch.Tensor, old_values_E: torch.Tensor, returns_E: torch.Tensor, *, clip: float | None = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `max((V - R)², (V_old + clamp(V - V_old, -clip, clip) - R)²) / 2` per token, and whether it was clipped.

    Source: the clipped value loss of PPO's reference implementation (OpenAI baselines, `ppo2`); see "The 37
    implementation details of PPO", ICLR blog track 2022, detail 9.
    """
    import torch

    squared_E = (values_E - returns_E).square()
    if clip is None:
        return 0.5 * squared_E, torch.zeros_like(squared_E, dtype=torch.bool)
    moved_E = values_E - old_values_E
    bounded_squared_E = (old_values_E + moved_E.clamp(-clip, clip) - returns_E).square()
    clipped_E = (moved_E.abs() > clip) & (bounded_squared_E > squared_E)  # within the clip, rounding alone differs
    return 0.5 * torch.maximum(squared_E, bounded_squared_E), clipped_E


def _clipped(
    ratio_E: torch.Tensor, advantages_E: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Losses:
    import torch

    plain_E = -advantages_E * ratio_E
    bounded_E = -advantages_E * ratio_E.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_E = torch.maximum(plain_E, bounded_E)
    clipped_E = bounded_E > plain_E
    if dual_clip is not None:
        ceiling_E = -advantages_E * dual_clip
        over_E = (advantages_E < 0) & (loss_E > ceiling_E)
        loss_E = torch.where(over_E, ceiling_E, loss_E)
        clipped_E = clipped_E | over_E
    return loss_E, clipped_E


def _none(logprobs_E: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.zeros_like(logprobs_E, dtype=torch.bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A policy loss and its properties.

    `mask`: decides over a whole update which tokens are left out of it; it takes the configured parameters then.
    `needs_ratio`: it divides by the probability with which a token was sampled, so it cannot use tokens from a
    truncated distribution. `by_call`: it also takes `calls_E`. `off_policy`: it is meant for tokens of an older policy
    although it has no ratio. `bounds`: its parameters that limit how far the ratio, or the probability, may move before
    a token loses its gradient. `product`: its ratio is the product over a call, in which rounding adds up.

    `second` is the formula once more, for the certificate; ours are in `evidence.certificate.plain.losses`. It shares
    no code with `function`, takes the same parameters, and gets the tokens of one call: logprobs now, those they are
    compared with, and advantages. It returns the loss of each token.
    """

    function: PolicyLossFunction
    formula: str
    needs_ratio: bool = True
    by_call: bool = False
    off_policy: bool = False
    bounds: tuple[str, ...] = ()
    product: bool = False
    mask: Callable[..., Kept] | None = None
    second: Callable[..., torch.Tensor] | None = None

    @property
    def configured(self) -> Callable[..., Any]:
        """The function whose keyword parameters the configuration sets."""
        return self.mask or self.function

    def narrowest_bound(self, arguments: Mapping[str, Any]) -> float:
        """Return the smallest of its `bounds` with these arguments; infinite without a clip, 0 for a `product`."""
        if self.product:
            return 0.0
        if arguments.get("clip") == "none":
            return float("inf")
        parameters = inspect.signature(self.function).parameters
        return min((float(arguments.get(name, parameters[name].default)) for name in self.bounds), default=float("inf"))


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(
        function=ppo_clip,
        formula="-min(ρ A, clamp(ρ, 1 - clip_low, 1 + clip_high) A)",
        bounds=("clip_low", "clip_high"),
    ),
    "gspo": PolicyLoss(
        function=gspo,
        formula="ppo with ρ of the call: exp(mean log ρ)",
        by_call=True,
        bounds=("clip_low", "clip_high"),
    ),
    "cispo": PolicyLoss(function=cispo, formula="-sg(clamp(ρ, 1 - clip_low, 1 + clip_high)) A log π"),
    "sapo": PolicyLoss(function=sapo, formula="-(4 / τ) sigmoid(τ (ρ - 1)) A"),
    "sapo_gate": PolicyLoss(function=sapo_gate, formula="-sg((4 / τ) sigmoid(τ (ρ - 1))) A log π"),
    "topr": PolicyLoss(function=topr, formula="-A log π if A > threshold else -sg(min(ρ, 1)) A log π"),
    "opmd": PolicyLoss(function=opmd, formula="-A log π / (1 + τ)", needs_ratio=False, off_policy=True),
    "reinforce": PolicyLoss(function=policy_gradient, formula="-A log π", needs_ratio=False),
    "sft": PolicyLoss(function=policy_gradient, formula="-A log π", needs_ratio=False),
    "importance_sampling": PolicyLoss(function=importance_sampling, formula="-ρ A"),
    "m2po": PolicyLoss(
        function=m2po,
        mask=within_moment,
        formula="-ρ A; 0 for the largest (log ρ)² of the update among A log ρ > 0, until their mean is <= threshold",
    ),
    "dppo_tv": PolicyLoss(
        function=dppo_tv,
        formula="-sg(min(ρ, max_ratio)) A log π; 0 where A > 0 and p - p_old > high, or A < 0 and p_old - p > low",
        bounds=("low", "high"),
    ),
    "dppo_kl": PolicyLoss(
        function=dppo_kl,
        formula="-sg(min(ρ, max_ratio)) A log π; 0 where A pushes p on and KL of (p_old, 1 - p_old) to (p, 1 - p) is "
        "above high (A > 0) or low (A < 0)",
    ),
    "vespo": PolicyLoss(
        function=vespo,
        formula="-sg(W^k e^(λ (1 - W))) A log π with W = Π ρ of the call",
        by_call=True,
        product=True,
    ),
    "sppo": PolicyLoss(function=sppo, formula="-A log ρ where 1 / (1 + ε) <= ρ <= 1 + ε, else 0", bounds=("epsilon",)),
    "rec": PolicyLoss(
        function=rec, formula="-A log π where ρ is within bounds, else 0", bounds=("clip_low", "clip_high")
    ),
}
"""Policy losses by their names in the configuration."""


def policy_loss_named(name: str | PolicyLoss | PolicyLossFunction) -> PolicyLoss:
    """Return the policy loss of a name in the settings. Raises `ConfigError` for one of somebody else's that is none,
    or has a part that the certificate could not compute again."""
    loss = named("policy_losses", name, POLICY_LOSSES, PolicyLoss)
    if not (isinstance(name, str) and name in POLICY_LOSSES) and loss.mask is not None:
        raise ConfigError(f"{name} has a mask, which only our own policy losses have: leave it out")
    return loss
