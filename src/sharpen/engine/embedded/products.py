"""The attention of a layer by plain batched products, and the rule that it follows.

In: queries, keys, values, an additive mask. Out: the attention output.

Shape suffixes: H query heads, G query heads of a key head, X batch of the product, D key size, E value size, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sharpen.engine.embedded.matmul import has_exact_products


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The parameters of a layer's attention: scale, sliding window, logit softcap, and the score of each head's sink (a
    key that every query sees, whose value is zero). A window of `chunks` does not slide: it begins at the last multiple
    of its length."""

    scale: float
    window: int | None = None
    chunks: bool = False
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None


def products(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Batched attention: queries [X, G, D], keys [X, D, L], values [X, L, E], additive mask broadcast to [X, G, L], and
    the sinks' scores [X, G, 1] if the rule has some.

    On a GPU that supports it, scores stay in fp32 even in half precision, as in the trainer's kernels.
    """
    exact = q.is_cuda and has_exact_products(q.device, q.dtype)
    if rule.softcap is not None:
        scores = torch.bmm(q, keys, out_dtype=torch.float32) if exact else torch.bmm(q, keys)
        scores = scores.mul_(rule.scale / rule.softcap).tanh_() * rule.softcap + mask
    elif exact:
        scores = torch.add(mask, torch.bmm(q, keys, out_dtype=torch.float32), alpha=rule.scale)
    else:
        scores = torch.baddbmm(mask, q, keys, alpha=rule.scale)
    if sinks is None:
        return torch.bmm(torch.softmax(scores, dim=-1).to(q.dtype), values)
    with_sink = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    return torch.bmm(torch.softmax(with_sink, dim=-1)[..., :-1].to(q.dtype), values)
