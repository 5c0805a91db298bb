"""An optimizer with a learning-rate schedule, gradient clipping, and a state made of plain tensors.

In: named parameters with gradients. Out: updated parameters. Raises `TrainingError` before anything is changed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from sharpen.config.trainer import TrainerConfig
from sharpen.errors import CheckpointError, TrainingError
from sharpen.learning.trainer.sharding import local, shard_like, sum_over_shards, whole

LARGE_GRADIENTS = 100_000_000
"""From so many weights on a CPU their gradients are in a block of their own."""
_ROW = 1024
"""Numbers whose squares are added up in the precision of the gradients."""


def length(gradient: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm of a gradient, added up row by row: PyTorch's own of float32 on a processor adds up
    all squares one after the other, so that of 10^8 numbers it is 1% too small."""
    kind, flat = torch.promote_types(gradient.dtype, torch.float32), gradient.reshape(-1)
    rows = flat[: len(flat) // _ROW * _ROW].view(-1, _ROW)
    lengths = [torch.linalg.vector_norm(rows, dim=1, dtype=kind)]
    lengths.append(torch.linalg.vector_norm(flat[rows.numel() :], dtype=kind)[None])
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(lengths), dtype=torch.float64)
    return total.to(kind)


def learning_rate(update: int, peak: float, config: TrainerConfig, planned_updates: int) -> float:
    """Return the learning rate of an update; updates count from 0.

    The rate rises linearly to the peak over `warmup_steps` updates. Then it stays constant, or falls to `min_lr_ratio`
    of the peak by the end of the planned updates and stays there.
    """
    if update < config.warmup_steps:
        return peak * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    progress = min((update - config.warmup_steps) / max(planned_updates - config.warmup_steps, 1), 1.0)
    decay = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay)


class GradientBlock:
    """One block of memory for the gradients of an update, which goes back to the system with them. The C library would
    put each between activations, and keep what is free between those that are left."""

    def __init__(self, parameters: Collection[torch.nn.Parameter]) -> None:
        self._ends = list(itertools.accumulate((one.numel() for one in parameters), initial=0))
        self._block: torch.Tensor | None = None
        for start, one in zip(self._ends, parameters, strict=False):
            one.register_post_accumulate_grad_hook(functools.partial(self._move, start))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Let the gradients that come be in the block."""
        self._block = torch.empty(self._ends[-1])

    def end(self) -> None:
        """Let go of the block."""
        self._block = None

    def _move(self, start: int, parameter: torch.Tensor) -> None:
        """Move a gradient to its place, where later ones are added."""
        if self._block is None or parameter.grad is None:
            return
        place = self._block[start : start + parameter.numel()].view_as(parameter)
        if parameter.grad.data_ptr() != place.data_ptr():
            parameter.grad = place.copy_(parameter.grad)


def _may_be_in_block(parameters: Collection[torch.nn.Parameter]) -> bool:
    """Whether these are many, and whole, in float32 on a CPU."""
    plain = all(
        one.device.type == "cpu" and one.dtype == torch.float32 and type(one.data) is torch.Tensor for one in parameters
    )
    return plain and sum(one.numel() for one in parameters) >= LARGE_GRADIENTS


class Optimizer:
    """Updates named parameters by the rule of `trainer.optimizer`."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: TrainerConfig,
        *,
        peak_learning_rate: float,
        planned_updates: int,
        tables: Collection[torch.nn.Parameter] = (),
        name: str = "",
    ) -> None:
        """Train these parameters, of which `tables` are embeddings and output layers. `name` is a prefix in errors and
        metrics; it is empty for the policy."""
        self.name = name
        self._parameters = dict(parameters)
        self._config = config
        self._peak = peak_learning_rate
        self._planned_updates = planned_updates
        self._block = GradientBlock(self.parameters) if _may_be_in_block(self.parameters) else None
        self._rules = make_optimizers(self._parameters.values(), tables, config)
        self._rule_of = {
            parameter: rule for rule in self._rules for group in rule.param_groups for parameter in group["params"]
        }

    @property
    def parameters(self) -> Collection[torch.nn.Parameter]:
        """The trained parameters."""
        return self._parameters.values()

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter got a gradient since `zero_grad`."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def begin(self) -> None:
        """Get ready for the gradients of an update."""
        if self._block is not None:
            self._block.begin()

    def zero_grad(self) -> None:
        """Discard the gradients."""
        for rule in self._rules:
            rule.zero_grad(set_to_none=True)
        if self._block is not None:
            self._block.end()

    def apply(self, update: int, norm: torch.Tensor) -> float:
        """Clip the gradients, which have this norm, and apply them as this update. Return its learning rate."""
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.max_grad_norm, norm)
        rate = learning_rate(update, self._peak, self._config, self._planned_updates)
        for rule in self._rules:
            set_update(rule, update, rate)
            rule.step()
        return rate

    def norm(self, update: int) -> torch.Tensor:
        """Return the norm of the gradients. Raises `TrainingError` if it is NaN or infinite; `update` is for its
        message."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        mine = [local(one) for one in gradients]
        if any(one.device.type != "cpu" for one in mine):
            norm = whole(torch.nn.utils.get_total_norm(gradients))
        else:
            squares = [length(one).double() ** 2 for one in mine]
            norm = sum_over_shards(torch.stack(squares).sum() if squares else torch.zeros(()), gradients).sqrt().float()
        if not math.isfinite(float(norm)):
            raise TrainingError(f"{self.name}: " * bool(self.name) + self._describe_non_finite(update))
        return norm

    def _describe_non_finite(self, update: int) -> str:
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            if count := int((~torch.isfinite(whole(parameter.grad))).sum()):
                return (
                    f"update {update}: {count} of {parameter.numel()} gradient values of {name} are NaN or infinite; "
                    "the update was not made. Lower the learning rate, or train in float32"
                )
        return (
            f"update {update}: the norm of the gradients is not finite, although every gradient value is; the update "
            "was not made. Lower the learning rate"
        )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the state as tensors named `<parameter name>/<kind>`; empty before the first update."""
        return {
            f"{name}/{kind}": tensor
            for name, parameter in self._parameters.items()
            for kind, tensor in state_tensors(self._rule_of[parameter], parameter).items()
        }

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors that an update changes, not copied: the parameters and `state_tensors`, by name."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()} | self.state_tensors()

    def keep_state_of(self, names: Collection[str]) -> None:
        """Discard the state of every parameter that has no tensor among these names."""
        for name, parameter in self._parameters.items():
            state = self._rule_of[parameter].state
            if not any(f"{name}/{kind}" in names for kind in state.get(parameter, {})):
                state.pop(parameter, None)

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what `state_tensors` returned. Raises `CheckpointError` for a parameter that this optimizer does not
        have."""
        state: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, kind = key.rpartition("/")
            state.setdefault(name, {})[kind] = tensor
        if unknown := state.keys() - self._parameters.keys():
            raise CheckpointError(
                f"the optimizer state is for parameters that the model does not have: {sorted(unknown)[:3]}"
            )
        for rule in self._rules:
            rule.state.clear()
        for name, kinds in state.items():
            parameter = self._parameters[name]
            mine = {kind: shard_like(tensor, parameter).clone() for kind, tensor in kinds.items()}
            load_state(self._rule_of[parameter], parameter, mine)


# Which torch optimizers apply an update, by `trainer.optimizer`.
#
# In: named parameters, settings. Out: torch optimizers that share the parameters between them, and the tensors of
# their states that a checkpoint holds.
#
# - `adamw`: torch's, two moments in fp32 for each weight. - `adamw_8bit`, `paged_adamw_8bit`: those of bitsandbytes,
# whose moments are quantized by blocks of 256 (Dettmers et al. 2022, arXiv 2110.02861); paged ones may be moved to the
# host's memory by the driver. Tensors of fewer than 4,096 weights keep moments in fp32. - `muon`: torch's Muon (Jordan
# et al. 2024) for the matrices of the blocks, with one moment, its updates scaled to the size of AdamW's so that
# learning rates carry over; AdamW for embeddings, the output layer, norms and biases.

_CONSTANTS = ("qmap1", "qmap2")
"""Parts of bitsandbytes' states that are the same for all weights: no checkpoint holds them."""


def make_optimizers(
    parameters: Collection[torch.nn.Parameter], tables: Collection[torch.nn.Parameter], config: TrainerConfig
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of these parameters. `tables` are those of embeddings and output layers. Norms and biases
    (fewer than two dimensions) have no weight decay."""
    left = list(parameters)
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        hidden = [p for p in left if p.ndim == 2 and min(p.shape) > 1 and not any(p is table for table in tables)]
        if hidden:
            decay = config.weight_decay
            optimizers.append(torch.optim.Muon(hidden, lr=1.0, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
        left = [p for p in left if not any(p is one for one in hidden)]
    groups = [
        {"params": [p for p in left if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in left if p.ndim < 2], "weight_decay": 0.0},
    ]
    if groups := [group for group in groups if group["params"]]:
        optimizers.append(_adamw(groups, config))
    return tuple(optimizers)


def _adamw(groups: list[dict[str, Any]], config: TrainerConfig) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": 1.0, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if not config.optimizer.endswith("_8bit"):
        return torch.optim.AdamW(groups, fused=True, **settings)
    from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

    on_cpu = all(parameter.device.type == "cpu" for group in groups for parameter in group["params"])
    pages = config.optimizer.startswith("paged_") and not on_cpu  # there is nowhere to move them to, as it would warn
    kind: Any = PagedAdamW8bit if pages else AdamW8bit
    optimizer: torch.optim.Optimizer = kind(groups, **settings)
    return optimizer


def set_update(optimizer: torch.optim.Optimizer, update: int, rate: float) -> None:
    """Set the learning rate of the coming update, which counts from 0. bitsandbytes counts updates by a plain number
    for each weight, which is part of no checkpoint: all weights have had as many as there were."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    for state in optimizer.state.values():
        if isinstance(state.get("step"), int):
            state["step"] = update


def state_tensors(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds of a parameter's state, by kind, not copied; empty before its first update."""
    state = optimizer.state.get(parameter, {})
    return {kind: part for kind, part in state.items() if torch.is_tensor(part) and kind not in _CONSTANTS}


def load_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Make these the parameter's state."""
    state: dict[str, Any] = dict(tensors)
    if "state1" in state:
        state["step"] = 0
        if state["state1"].dtype == torch.uint8:
            maps = _quantiles(optimizer, parameter.device)
            state |= dict(zip(_CONSTANTS, maps, strict=True))
    optimizer.state[parameter] = state


def _quantiles(optimizer: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values that bitsandbytes' 8 bits stand for: signed ones, and positive ones."""
    if "dynamic" not in optimizer.name2qmap:
        optimizer.fill_qmap()
    return optimizer.name2qmap["dynamic"].to(device), optimizer.name2qmap["udynamic"].to(device)
