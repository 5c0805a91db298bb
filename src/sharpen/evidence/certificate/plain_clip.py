"""Which tokens of a step lose their advantage because training on them lowers the entropy (`clipb`, `clipv`), found a
second time to repeat an update.

In: the advantages of a step's tokens, and the distributions that they were drawn from under the weights before its
first update. Out: for each token whether it is left out. Written out from arXiv 2602.03392 and
`docs/reference/algorithms.md`; nothing is shared with `algorithm.clip_entropy`.

Shape suffixes: S tokens of a sequence with loss, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sharpen.errors import ModelError
from sharpen.evidence.certificate.rules import Rules

Tensor = torch.Tensor

_CLOSE = 1e-5
"""A token this close to a bound, in deviations, is left out or not as rounding in float32 will."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyClip:
    """The bound, in standard deviations. `own`: a token is compared with the mean over its own distribution, and at
    most `share` of the step's tokens are left out (at least one); else with the mean over all tokens."""

    own: bool
    mu: float
    share: float | None = None

    @classmethod
    def of(cls, rules: Rules) -> EntropyClip | None:
        """Return the clip that a run's rules define, None if there is none."""
        if rules.advantage == "clipb":
            return cls(own=False, mu=rules.arguments.get("mu", 2.5))
        if rules.advantage == "clipv":
            share = rules.arguments.get("max_frac", 1e-4)
            return cls(own=True, mu=rules.arguments.get("mu", 8.5), share=share)
        return None

    def left_out(self, advantages: Sequence[Tensor], terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return for each sequence which of its tokens (S) are left out; `terms` are those
        of `entropy_terms`, of the sampled tokens. Raises
        `ModelError` if rounding decides about one."""
        if not advantages:
            return []
        falls_S = torch.cat([of_token_S for of_token_S, _ in terms]).double()
        means_S = torch.cat([mean_S for _, mean_S in terms]).double() if self.own else falls_S.mean()
        pushed_S = torch.cat([*advantages]) < 0
        below_S = means_S - falls_S
        deviation = float(((below_S - below_S.mean()) ** 2).mean().sqrt())
        bound, close = self.mu * deviation, _CLOSE * deviation
        out_S = pushed_S & (below_S > bound) & (deviation >= 1e-12)
        furthest = torch.sort(below_S[out_S], descending=True).values
        if self.share is not None and len(furthest) > (most := max(int(self.share * len(out_S)), 1)):
            if float(furthest[most - 1] - furthest[most]) <= close:
                raise ModelError("rounding decides which of two tokens loses its advantage")
            bound = float(furthest[most - 1] + furthest[most]) / 2
            out_S &= below_S > bound
        if deviation >= 1e-12 and bool((pushed_S & ((below_S - bound).abs() <= close)).any()):
            raise ModelError("rounding decides whether a token loses its advantage")
        return [*torch.split(out_S, [len(one) for one in advantages])]


def entropy_terms(logprobs_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Return `p (H + log p)` of each id (S, V), by how much the entropy falls as its logit rises, and the mean of that
    over the distribution (S)."""
    p_SV = logprobs_SV.exp()
    falls_SV = p_SV * (logprobs_SV - (p_SV * logprobs_SV).sum(-1, keepdim=True))
    return falls_SV, (p_SV * falls_SV).sum(-1)
