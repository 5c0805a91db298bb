"""Lets a mixture of experts compute with the experts that were recorded, to repeat an update.

In: the experts of each token in each layer with a router. Out: a block within which transformers' own routers choose
them. Nothing is shared with `models.routing`: every router chooses by one `topk` among all experts of a layer; the
first of these calls in a forward pass is that of the first layer with a router, and so on.

Shape suffixes: N tokens, L layers with a router, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sharpen.errors import ModelError

_SIZES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What families call the number of experts of a layer."""


def num_experts_of(config: Any) -> int | None:
    """Return how many experts a layer of a model has; None if it says none."""
    text = config.get_text_config()
    return next((value for name in _SIZES if isinstance(value := getattr(text, name, None), int)), None)


class Chosen(TorchFunctionMode):
    """Gives the recorded experts and their own scores in place of the best ones. Raises `ModelError` at the end of the
    block unless each layer's were asked for once."""

    def __init__(self, routes_NLK: torch.Tensor, num_experts: int | None) -> None:
        super().__init__()
        self._routes_NLK, self._num_experts = routes_NLK, num_experts
        self._layer = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in (torch.topk, torch.Tensor.topk):
            return function(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        num_chosen = args[1] if len(args) > 1 else kwargs["k"]
        num_tokens, num_layers, num_recorded = self._routes_NLK.shape
        if tuple(scores.shape) != (num_tokens, self._num_experts) or num_chosen != num_recorded:
            return function(*args, **kwargs)  # among groups of experts
        self._layer += 1
        if self._layer > num_layers:
            raise ModelError(f"experts are recorded for {num_layers} layers, and the model has more with a router")
        chosen_NK = self._routes_NLK[:, self._layer - 1]
        return torch.return_types.topk((scores.gather(1, chosen_NK), chosen_NK))

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        if kind is None and self._layer != self._routes_NLK.shape[1]:
            raise ModelError(
                f"experts are recorded for {self._routes_NLK.shape[1]} layers, and {self._layer} routers chose among "
                f"{self._num_experts} by one topk"
            )
