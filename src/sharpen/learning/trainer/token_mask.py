"""Sets the advantage of tokens to 0 that a policy loss leaves out of an update (`m2po`).

In: all packs of an update, and the policy before it. Out: copies of the packs, with advantage 0 for some entries, and
metrics. It costs one forward pass over all tokens of the update, since which ones are left out depends on all of them.
A token that is left out still counts in the normalization of the loss and in the KL term.

Shape suffixes: S loss tokens of an update, E loss entries of a pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.trainer.work import Part


def mask_tokens(
    scored: Iterable[tuple[Part, torch.Tensor]], algorithm: Algorithm
) -> tuple[Sequence[Part], dict[str, float]]:
    """Return the parts of an update, some advantages of which are 0, and metrics. `scored` has each part with its
    current logprobs (shape E)."""
    parts, logprobs = zip(*scored, strict=True)
    now_S = torch.cat(logprobs).double().numpy()
    old_S, advantages_S, rollouts_S, calls_S, tokens_S = (
        np.concatenate([getattr(part.pack, name) for part in parts])
        for name in ("logprobs_E", "advantages_E", "rollouts_E", "calls_E", "tokens_E")
    )
    order_S = np.lexsort((tokens_S, calls_S, rollouts_S))  # does not depend on the packs
    found = algorithm.keeps_tokens(advantages_S.astype(np.float64)[order_S], (now_S - old_S)[order_S])
    kept_S = np.empty_like(found.kept_S)
    kept_S[order_S] = found.kept_S
    ends = np.cumsum([part.pack.num_trained_tokens for part in parts])[:-1]
    masked = [
        replace(part, pack=replace(part.pack, advantages_E=advantages_E), left_out_E=part.left_out_with(~kept_E))
        for part, advantages_E, kept_E in zip(
            parts,
            np.split(np.where(kept_S, advantages_S, np.float32(0)), ends),
            np.split(kept_S, ends),
            strict=True,
        )
    ]
    return masked, found.metrics()
