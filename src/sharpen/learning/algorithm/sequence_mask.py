"""Leaves out of an update the bad answers that the policy no longer gives (off-policy sequence masking).

In: for each token that carries loss its logprobs now and as recorded, its advantage, and its call. Out: which tokens
are left out, and which share of a call each token is, so that calls can be counted.

Shape suffixes: E tokens that carry loss, C calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharpen.learning.algorithm.losses import call_log_ratio

if TYPE_CHECKING:
    import torch


def far_and_bad(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    calls_E: torch.Tensor,
    *,
    threshold: float,
) -> torch.Tensor:
    """Return which tokens (E, bool) have a negative advantage in a call whose mean `log(π_old / π)`, in nats, is above
    `threshold`. `calls_E` is as in `call_log_ratio`: all tokens of a call must be passed together.

    Source: DeepSeek-V3.2, arXiv 2512.02556, equation 9, there on whole answers; a token here, as in Trinity-RFT 0.6.0,
    looks at its own advantage.
    """
    apart_E = -call_log_ratio(logprobs_E, old_logprobs_E, calls_E)
    return (advantages_E < 0) & (apart_E > threshold)


def shares_of_calls(calls_E: torch.Tensor, like_E: torch.Tensor) -> torch.Tensor:
    """Return for each token 1 / the number of tokens of its call: they sum to the number of calls."""
    import torch

    sizes_C = like_E.new_zeros(len(calls_E)).index_add_(0, calls_E, torch.ones_like(like_E))
    return 1.0 / sizes_C[calls_E]
