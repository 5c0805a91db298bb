"""The loss of a micro-batch and its metrics, both as sums, so that those of an update's micro-batches add up.

In: an `Algorithm` and, for each loss token, logprobs, advantage and weight. Out: the loss (`sum(weights * per-token
loss)`), `ObjectiveSums`, and `PolicyTokens`. Metrics of the ratio compare the current logprobs with those that the
engine recorded.

Shape suffixes: E loss tokens, N sequences (calls or rollouts).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sharpen.errors import ConfigError
from sharpen.learning.algorithm.behaviour import behaviour_weights
from sharpen.learning.algorithm.kl import estimator, k3
from sharpen.learning.algorithm.losses import log_ratio
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.sequence_mask import far_and_bad, shares_of_calls

MIN_EFFECTIVE_SAMPLE_SHARE = 0.3
"""Below this share, an alarm says that the importance weights have collapsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSums:
    """Scalars without gradient that are summed over micro-batches (for `ratio_max`, the maximum).

    `policy_loss`, `kl_loss`, `entropy_loss` and `distill_loss` are the weighted terms of the loss; the others are plain
    sums over tokens.
    """

    num_tokens: torch.Tensor
    policy_loss: torch.Tensor
    kl_loss: torch.Tensor
    entropy_loss: torch.Tensor
    distill_loss: torch.Tensor
    clipped: torch.Tensor
    kl_old: torch.Tensor
    kl_reference: torch.Tensor
    entropy: torch.Tensor
    divergence: torch.Tensor
    ratio: torch.Tensor
    ratio_max: torch.Tensor
    behaviour: torch.Tensor
    behaviour_bounded: torch.Tensor
    left_out: torch.Tensor
    calls_left_out: torch.Tensor
    num_calls: torch.Tensor

    def __add__(self, other: ObjectiveSums) -> ObjectiveSums:
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        sums["ratio_max"] = torch.maximum(self.ratio_max, other.ratio_max)
        return ObjectiveSums(**sums)

    def cpu(self) -> ObjectiveSums:
        """Copy the sums to the CPU, in one transfer."""
        values = torch.stack([getattr(self, name) for name in self.__slots__]).cpu()
        return ObjectiveSums(**dict(zip(self.__slots__, values.unbind(), strict=True)))

    @classmethod
    def none(cls, device: torch.device) -> ObjectiveSums:
        """Return sums over no tokens."""
        return cls(**{name: torch.zeros((), device=device) for name in cls.__slots__})

    def means(self, algorithm: Algorithm) -> dict[str, float]:
        """Return metrics; means are over tokens. Those of terms that the algorithm does not have are left out."""
        num_tokens = max(float(self.num_tokens), 1.0)
        metrics = {
            "loss": float(self.policy_loss + self.kl_loss + self.entropy_loss + self.distill_loss),
            "policy_loss": float(self.policy_loss),
            "clip_fraction": float(self.clipped) / num_tokens,
            "kl_old": float(self.kl_old) / num_tokens,
            "ratio_mean": float(self.ratio) / num_tokens,
            "ratio_max": float(self.ratio_max),
        }
        if algorithm.needs_reference:
            metrics["kl_reference"] = float(self.kl_reference) / num_tokens
            if algorithm.kl_in == "loss":
                metrics["kl_loss"] = float(self.kl_loss)
        if algorithm.behaviour != "none":
            metrics["behaviour_weight_mean"] = float(self.behaviour) / num_tokens
            metrics["behaviour_bounded_fraction"] = float(self.behaviour_bounded) / num_tokens
        if algorithm.sequence_mask is not None:
            metrics["sequence_mask_token_fraction"] = float(self.left_out) / num_tokens
            metrics["sequence_mask_call_fraction"] = float(self.calls_left_out) / max(float(self.num_calls), 1.0)
        if algorithm.distill is not None and algorithm.distill.of_vocabulary:
            metrics["distill_loss"] = float(self.distill_loss)
            metrics["distill_divergence"] = float(self.divergence) / num_tokens
        if algorithm.needs_entropy:
            metrics |= {"entropy_loss": float(self.entropy_loss), "entropy": float(self.entropy) / num_tokens}
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """What the policy loss did with each token (E), without gradient.

    `log_ratios_E` are those to the logprobs that the loss compares with: the record, or with a `behaviour` weight those
    of the weights before the step's first update. `clipped_E` says which tokens it gave no gradient because of a bound:
    its own clip, the bounds of `behaviour: masked`, or `sequence_mask`.
    """

    log_ratios_E: torch.Tensor
    clipped_E: torch.Tensor


def policy_objective(
    algorithm: Algorithm,
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    weights_E: torch.Tensor,
    ref_logprobs_E: torch.Tensor | None = None,
    entropy_E: torch.Tensor | None = None,
    calls_E: torch.Tensor | None = None,
    proximal_E: torch.Tensor | None = None,
    policy_weight: float = 1.0,
    divergence_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ObjectiveSums, PolicyTokens]:
    """Compute the loss of some of an update's tokens, the sums for its metrics, and what it did with each token.

    All tensors have shape E; only `logprobs_E`, `entropy_E` and `divergence_E` (from the teacher) have a gradient. What
    the algorithm needs is required: `ref_logprobs_E` if it `needs_reference`, `entropy_E` if it `needs_entropy`,
    `divergence_E` if it distills over the vocabulary, `calls_E` (the number of each token's call) if it is `by_call`.
    `proximal_E` are the logprobs under the weights before the step's first update, for a `behaviour` weight (None: the
    current weights). `policy_weight` multiplies the policy loss alone.
    """
    zero, base_E = logprobs_E.new_zeros(()), _compared(algorithm, logprobs_E, old_logprobs_E, proximal_E)
    given = (logprobs_E, old_logprobs_E, advantages_E, calls_E)
    policy_E, clipped_E, behaviour_E, bounded_E = _policy_tokens(algorithm, *given, base_E)
    left_out_E, counts = _left_out(algorithm, *given)
    policy_loss, kl_loss, entropy_loss = policy_weight * (weights_E * policy_E * ~left_out_E).sum(), zero, zero
    kl_reference, entropy_sum, distill_loss, divergence_sum = zero, zero, zero, zero
    if algorithm.needs_reference:
        kl_E = estimator(algorithm.kl)(logprobs_E, _required(ref_logprobs_E), old_logprobs_E)
        if algorithm.kl_in == "loss":
            kl_loss = algorithm.kl_coef * (weights_E * kl_E).sum()
        kl_reference = kl_E.detach().sum()
    if algorithm.needs_entropy:
        entropy_loss = -algorithm.entropy_coef * (weights_E * _required(entropy_E)).sum()
        entropy_sum = _required(entropy_E).detach().sum()
    if algorithm.distill is not None and algorithm.distill.of_vocabulary:
        distill_loss = algorithm.distill.coef * (weights_E * _required(divergence_E)).sum()
        divergence_sum = _required(divergence_E).detach().sum()
    with torch.no_grad():
        ratio_E = log_ratio(logprobs_E, old_logprobs_E).exp()
        sums = ObjectiveSums(
            num_tokens=zero + logprobs_E.numel(),
            policy_loss=policy_loss.detach(),
            kl_loss=kl_loss.detach(),
            entropy_loss=entropy_loss.detach(),
            distill_loss=distill_loss.detach(),
            clipped=clipped_E.sum().to(zero.dtype),
            kl_old=k3(old_logprobs_E, logprobs_E).sum(),  # KL(old || now), as tokens were sampled from the old policy
            kl_reference=kl_reference,
            entropy=entropy_sum,
            divergence=divergence_sum,
            ratio=ratio_E.sum(),
            ratio_max=ratio_E.max() if ratio_E.numel() else zero,
            behaviour=behaviour_E.sum(),
            behaviour_bounded=bounded_E.sum().to(zero.dtype),
            **counts,
        )
        without_gradient_E = clipped_E | (behaviour_E == 0) | left_out_E
        tokens = PolicyTokens(log_ratios_E=log_ratio(logprobs_E, base_E), clipped_E=without_gradient_E)
    return policy_loss + kl_loss + entropy_loss + distill_loss, sums, tokens


def _required(tensor_E: torch.Tensor | None) -> torch.Tensor:
    assert tensor_E is not None, "the caller must pass this tensor for this algorithm"
    return tensor_E


def _compared(
    algorithm: Algorithm, logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, proximal_E: torch.Tensor | None
) -> torch.Tensor:
    """Return the logprobs that the policy loss compares the current ones with."""
    if algorithm.behaviour == "none":
        return old_logprobs_E
    return logprobs_E.detach() if proximal_E is None else proximal_E


def _policy_tokens(
    algorithm: Algorithm,
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    calls_E: torch.Tensor | None,
    base_E: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each token's policy loss, whether it was clipped, its behaviour weight, and whether that was bounded."""
    loss = algorithm.of_policy_loss
    inputs: tuple[torch.Tensor, ...] = (logprobs_E, base_E, advantages_E)
    if loss.by_call:
        inputs = (*inputs, _required(calls_E))
    arguments = algorithm.policy_loss_args if loss.mask is None else {}
    policy_E, clipped_E = loss.function(*inputs, **arguments)
    if policy_E.shape != logprobs_E.shape or clipped_E.shape != logprobs_E.shape or clipped_E.dtype != torch.bool:
        raise ConfigError(
            f"the policy loss {algorithm.policy_loss!r} must return a loss for each of {logprobs_E.numel()} tokens and "
            f"whether it was clipped (bool); the shapes are {tuple(policy_E.shape)} and {tuple(clipped_E.shape)}"
        )
    if algorithm.behaviour == "none":
        return policy_E, clipped_E, torch.ones_like(old_logprobs_E), torch.zeros_like(clipped_E)
    weight_E, bounded_E = behaviour_weights(
        algorithm.behaviour, base_E, old_logprobs_E, algorithm.behaviour_low, algorithm.behaviour_high
    )
    return weight_E * policy_E, clipped_E, weight_E, bounded_E


def _left_out(
    algorithm: Algorithm,
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    calls_E: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return which tokens `sequence_mask` leaves out, and its sums."""
    left_out_E, shares_E = torch.zeros_like(logprobs_E, dtype=torch.bool), torch.zeros_like(logprobs_E)
    if algorithm.sequence_mask is not None:
        calls_E = _required(calls_E)
        left_out_E = far_and_bad(logprobs_E, old_logprobs_E, advantages_E, calls_E, threshold=algorithm.sequence_mask)
        shares_E = shares_of_calls(calls_E, logprobs_E.detach())
    return left_out_E, {
        "left_out": left_out_E.sum().to(shares_E.dtype),
        "calls_left_out": (shares_E * left_out_E).sum(),
        "num_calls": shares_E.sum(),
    }


def sequence_log_ratios(
    logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, sequences_E: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """Return the log of each sequence's importance weight (shape N): the sum of its tokens' log ratios, not clamped.

    `sequences_E` has the number of each token's sequence (a call or a whole rollout) in the update. Results of several
    micro-batches can be added.
    """
    log_ratios_E = (logprobs_E - old_logprobs_E).detach().double()
    return log_ratios_E.new_zeros(num_sequences).index_add_(0, sequences_E, log_ratios_E)


def effective_sample_share(log_ratios_N: torch.Tensor) -> float:
    """Return Kish's effective sample size over the number of sequences: `(Σw)² / (N Σw²)`, 1 if all weights are equal.

    It falls towards 1/N if a few sequences outweigh all others, as happens with long rollouts of an older policy.
    Source: A. Kong, "A note on importance sampling using standardized weights", 1992.
    """
    if log_ratios_N.numel() == 0:
        return 1.0
    log_N = log_ratios_N.double()
    log_share = 2 * torch.logsumexp(log_N, 0) - torch.logsumexp(2 * log_N, 0)
    return float(log_share.exp()) / log_ratios_N.numel()


def sample_share_alarm(share: float) -> str | None:
    """Return a warning for the user if the effective sample share is too low, else None."""
    if share >= MIN_EFFECTIVE_SAMPLE_SHARE:
        return None
    return (
        f"importance weights have collapsed: the effective sample size is {share:.1%} of the sequences (alarm below "
        f"{MIN_EFFECTIVE_SAMPLE_SHARE:.0%}). The weights moved too far from those that sampled the data"
    )
