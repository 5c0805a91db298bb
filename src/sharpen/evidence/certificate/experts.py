"""Checks the recorded experts of a mixture of experts: that every trained call has them, and that they are possible.

In: the trained calls as sequences, and how many experts the model has and chooses. Out: a sentence, or "".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sharpen.types import Experience


class Experts(Protocol):
    """How a model routes: its layers with experts, the experts of each, and how many it chooses for a token."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...


def wrong_experts(sequences: Iterable[Experience], experts: Experts) -> str:
    """Return a sentence about the first sequence whose experts are missing or impossible."""
    for one in sequences:
        call = int(one.calls_T[-1])
        where = f"rollout {one.rollout_id}, call {call}"
        routes_NLK = one.routes_NLK
        if routes_NLK is None:
            return f"{where}: its experts were not recorded, so its logprobs cannot be computed again"
        if routes_NLK.shape != (len(one.ids_T) - 1, experts.num_layers, experts.top_k):
            return (
                f"{where}: experts of the shape {routes_NLK.shape} are recorded, for {len(one.ids_T)} tokens and a "
                f"model that chooses {experts.top_k} experts in {experts.num_layers} layers"
            )
        if routes_NLK.size and int(routes_NLK.max()) >= experts.num_experts:
            return f"{where}: expert {int(routes_NLK.max())} is recorded, but the model has {experts.num_experts}"
    return ""
