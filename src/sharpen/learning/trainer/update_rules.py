"""Which torch optimizers apply an update, by `trainer.optimizer`.

In: named parameters, settings. Out: torch optimizers that share the parameters between them, and the tensors of their
states that a checkpoint holds.

- `adamw`: torch's, two moments in fp32 for each weight.
- `adamw_8bit`, `paged_adamw_8bit`: those of bitsandbytes, whose moments are quantized by blocks of 256 (Dettmers et al.
  2022, arXiv 2110.02861); paged ones may be moved to the host's memory by the driver. Tensors of fewer than 4,096
  weights keep moments in fp32.
- `muon`: torch's Muon (Jordan et al. 2024) for the matrices of the blocks, with one moment, its updates scaled to the
  size of AdamW's so that learning rates carry over; AdamW for embeddings, the output layer, norms and biases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from sharpen.config.trainer import TrainerConfig

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
