"""Mixture of experts: records which experts a model's routers choose, and makes them choose recorded ones again.

In: a loaded Hugging Face model. Out: its `Routing`. An engine records the experts of each token that it computes; the
trainer replays them, because its own choice could differ where two experts' scores are nearly equal, and the logprob
then differs by far more than rounding. Nothing of a router is computed here: its own forward pass runs, and only the
`topk` within it, which chooses the experts, is recorded or given the recorded choice. So the weights of the experts are
computed from the router's own scores in the way of its family, and gradients flow to them. A balance loss
(`models.balance`) is added to the gradient of the logits, the output of the one linear layer within.

Shape suffixes: N computed tokens, L layers with a router, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from sharpen.errors import ModelError
from sharpen.models.balance import Balance
from sharpen.models.experts import has_experts
from sharpen.types import RouteArray

_ROUTER = re.compile(r"(Router|Gating|MoEV1Gate)$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("top_k", "num_experts_per_tok", "top_k_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """The routes of one token: its experts in each layer that has a router."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type for the number of an expert."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


class Routing:
    """The routers of one model, which it wraps."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Wrap the routers of `module`. Raises `ModelError` if they differ in their numbers of experts."""
        found = [(name, router) for name, router in module.named_modules() if is_router(router)]
        self._routers = [_Router(name, router) for name, router in found]
        sizes = {(router.top_k, router.num_experts) for router in self._routers}
        if len(sizes) != 1:
            what = "its routers choose different numbers of experts" if sizes else "it has no router that is known here"
            raise ModelError(
                f"{type(module).__name__} routes tokens to experts, but {what}: its routing cannot be replayed"
            )
        top_k, num_experts = sizes.pop()
        self.shape = RouteShape(num_layers=len(found), top_k=top_k, num_experts=num_experts)
        self._replayed_NLK: torch.Tensor | None = None
        self._balance: Balance | None = None

    @property
    def layers(self) -> list[int]:
        """The numbers of the model's layers that have a router, counted over all its layers."""
        found = [_LAYER.search(router.name) for router in self._routers]
        return [int(match[1]) for match in found if match is not None]

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record what the routers choose in the forward passes inside this block; each replaces the one before."""
        for router in self._routers:
            router.records = True
        try:
            yield Recording(self._routers)
        finally:
            for router in self._routers:
                router.records, router.chosen_NK = False, None

    @contextmanager
    def replaying(self, routes_NLK: torch.Tensor | None) -> Iterator[None]:
        """Make the routers choose these experts (int64) inside this block; None lets them choose by themselves."""
        before = self._replayed_NLK
        self._set(routes_NLK)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, routes_NLK: torch.Tensor | None) -> None:
        self._replayed_NLK = routes_NLK
        for number, router in enumerate(self._routers):
            router.replayed_NK = None if routes_NLK is None else routes_NLK[:, number]

    @contextmanager
    def balancing(self, balance: Balance | None) -> Iterator[None]:
        """Add a balance loss to the gradients of forward passes inside this block; None adds none."""
        before = self._balance
        self._set_balance(balance)
        try:
            yield
        finally:
            self._set_balance(before)

    def _set_balance(self, balance: Balance | None) -> None:
        self._balance = balance
        for number, router in enumerate(self._routers):
            router.balance = None if balance is None else (balance, number)

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return what `torch.utils.checkpoint` takes as `context_fn`: a layer that the backward pass computes again
        chooses the same experts as in the forward pass, and has the same balance loss."""
        return nullcontext(), self._again(self._replayed_NLK, self._balance)

    @contextmanager
    def _again(self, routes_NLK: torch.Tensor | None, balance: Balance | None) -> Iterator[None]:
        balance = None if balance is None else replace(balance, values=[])  # it was measured in the forward pass
        with self.replaying(routes_NLK), self.balancing(balance):
            yield

    def check_all_chose(self) -> None:
        """Raise `ModelError` if a router did not choose its experts by one `topk` in the last recorded forward pass:
        then nothing can be replayed."""
        for router in self._routers:
            if router.num_choices != 1:
                raise ModelError(
                    f"{router.name} ({router.kind}) chooses its experts by {router.num_choices} calls of topk among "
                    f"{router.num_experts}, not by one: its routing cannot be replayed"
                )

    def check_balance(self) -> None:
        """Raise `ModelError` if a balance loss cannot be added: a router did not compute its logits by one linear layer
        in the last recorded forward pass."""
        for router in self._routers:
            if router.num_logits != 1:
                raise ModelError(
                    f"trainer.balance_coef: {router.name} ({router.kind}) computes its scores by {router.num_logits} "
                    "linear layers, not by one: a balance loss cannot be added to them; leave balance_coef out"
                )


def routing_of(module: torch.nn.Module) -> Routing | None:
    """Return the routing of a mixture of experts, whose routers are wrapped; None for a dense model."""
    return Routing(module) if has_experts(module) else None


@contextmanager
def recording(routing: Routing | None) -> Iterator[Recording | None]:
    """Record inside this block, if there is a routing."""
    if routing is None:
        yield None
        return
    with routing.recording() as recorded:
        yield recorded


class Recording:
    """The experts chosen in the last forward pass."""

    def __init__(self, routers: list[_Router]) -> None:
        self._routers = routers

    @property
    def routes_NLK(self) -> torch.Tensor:
        """The experts of each token in each layer, on the model's device."""
        chosen = [router.chosen_NK for router in self._routers if router.chosen_NK is not None]
        assert len(chosen) == len(self._routers), "every router chooses: this is checked at the start"
        return torch.stack(chosen, dim=1)


class _Router:
    """A router whose forward pass is wrapped."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name, self.kind = name, type(module).__name__
        self.top_k, self.num_experts = _number(module, _TOP_K), _number(module, _NUM_EXPERTS)
        self.records = False
        self.chosen_NK: torch.Tensor | None = None
        self.replayed_NK: torch.Tensor | None = None
        self.balance: tuple[Balance, int] | None = None
        self.num_choices = self.num_logits = 0
        self.by_sigmoid = False
        self._forward = module.forward
        module.forward = self._route

    def _route(self, *args: Any, **kwargs: Any) -> Any:
        if not self.records and self.replayed_NK is None and self.balance is None:
            return self._forward(*args, **kwargs)
        choice = _Choice(self.top_k, self.num_experts, self.replayed_NK, self._balanced if self.balance else None)
        with choice:
            output = self._forward(*args, **kwargs)
        self.num_choices, self.num_logits = choice.count, choice.num_logits
        self.by_sigmoid = choice.by_sigmoid
        if self.replayed_NK is not None and choice.count != 1:
            raise ModelError(f"{self.name} ({self.kind}) did not choose its experts by one topk: nothing was replayed")
        if self.records:
            self.chosen_NK = choice.chosen_NK
        return output

    def _balanced(self, logits_NE: torch.Tensor) -> torch.Tensor:
        assert self.balance is not None
        balance, number = self.balance
        return balance.add(logits_NE, number, by_sigmoid=self.by_sigmoid)


class _Choice(TorchFunctionMode):
    """Within it, the `topk` that chooses `top_k` of `num_experts` for each token is recorded, or gives `replayed_NK`
    and their scores. `balanced` is applied to the logits; whether they go through a sigmoid is noted."""

    def __init__(
        self,
        top_k: int,
        num_experts: int,
        replayed_NK: torch.Tensor | None,
        balanced: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.count = self.num_logits = 0
        self.by_sigmoid = False
        self.chosen_NK = replayed_NK
        self._top_k, self._num_experts = top_k, num_experts
        self._replayed_NK, self._balanced = replayed_NK, balanced

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.topk, torch.Tensor.topk):
            return self._chosen(function, args, kwargs)
        output = function(*args, **kwargs)
        if function in (torch.sigmoid, torch.Tensor.sigmoid):
            self.by_sigmoid = True
        elif function is torch.nn.functional.linear and output.shape[-1] == self._num_experts:
            self.num_logits += 1
            if self._balanced is not None and output.requires_grad:
                return self._balanced(output)
        return output

    def _chosen(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        scores = args[0] if args else kwargs["input"]
        top_k = args[1] if len(args) > 1 else kwargs["k"]
        if scores.dim() != 2 or scores.shape[1] != self._num_experts or top_k != self._top_k:
            return function(*args, **kwargs)  # it chooses groups of experts
        self.count += 1
        if self._replayed_NK is None:
            found = function(*args, **kwargs)
            self.chosen_NK = found.indices
            return found
        return torch.return_types.topk((scores.gather(1, self._replayed_NK), self._replayed_NK))


def is_router(module: torch.nn.Module) -> bool:
    """Whether a module chooses experts."""
    return _ROUTER.search(type(module).__name__) is not None and any(True for _ in module.parameters())


def _number(module: torch.nn.Module, names: tuple[str, ...]) -> int:
    """Return the first of these attributes of a router or of its configuration."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    raise ModelError(f"{type(module).__name__} does not say how many experts it chooses: its routing is not supported")


def to_array(routes_NLK: torch.Tensor, shape: RouteShape) -> RouteArray:
    """Return routes as a compact array."""
    array: RouteArray = routes_NLK.cpu().numpy().astype(shape.dtype)
    return array
