"""AdamW with a learning-rate schedule and gradient clipping, and its state as plain tensors.

In: named parameters with gradients. Out: updated parameters. Errors: `TrainingError` before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch

from sharpen.config.trainer import TrainerConfig
from sharpen.errors import CheckpointError, TrainingError
from sharpen.trainer.sharding import divided_like, whole


def learning_rate(update: int, peak: float, config: TrainerConfig, planned_updates: int) -> float:
    """The rate of the update with this number (from 0).

    It rises linearly over `warmup_steps` updates, the last of which has the peak; then it stays, or falls to
    `min_lr_ratio` of the peak at the end of the planned updates, and stays there beyond them.
    """
    if update < config.warmup_steps:
        return peak * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    progress = min((update - config.warmup_steps) / max(planned_updates - config.warmup_steps, 1), 1.0)
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


class Optimizer:
    """AdamW over named parameters. Norms and biases (fewer than two dimensions) are not decayed."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: TrainerConfig,
        *,
        peak_learning_rate: float,
        planned_updates: int,
        name: str = "",
    ) -> None:
        """Train these parameters. `name` tells it apart in errors and metrics; the policy's has none."""
        self.name = name
        self._parameters = dict(parameters)
        self._config = config
        self._peak = peak_learning_rate
        self._planned_updates = planned_updates
        groups = [
            {"params": [p for p in self._parameters.values() if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self._parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=peak_learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    @property
    def parameters(self) -> Collection[torch.nn.Parameter]:
        """What it trains."""
        return self._parameters.values()

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter has one since `zero_grad`."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def apply(self, update: int, norm: torch.Tensor) -> float:
        """Clip the gradients, whose norm this is, and apply them as the update with this number; returns the rate."""
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.max_grad_norm, norm)
        rate = learning_rate(update, self._peak, self._config, self._planned_updates)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        return rate

    def norm(self, update: int) -> torch.Tensor:
        """The norm of the gradients. Raises `TrainingError`, naming the update, if it is NaN or infinite."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters.values() if p.grad is not None])
        norm = whole(norm)
        if not math.isfinite(float(norm)):
            raise TrainingError(f"{self.name}: " * bool(self.name) + self._name_non_finite(update))
        return norm

    def _name_non_finite(self, update: int) -> str:
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            if count := int((~torch.isfinite(whole(parameter.grad))).sum()):
                return (
                    f"update {update}: {count} of {parameter.numel()} gradient values of {name} are NaN or infinite; "
                    "the update was not made. Lower the learning rate, or train in float32"
                )
        return (
            f"update {update}: the norm of the gradients is not finite though each of them is; the update was not made"
        )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The state as `<parameter name>/<kind>` tensors; empty before the first update."""
        return {
            f"{name}/{kind}": tensor
            for name, parameter in self._parameters.items()
            for kind, tensor in self._adam.state.get(parameter, {}).items()
        }

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by name and the state as `state_tensors` names it: the memory that an update changes."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()} | self.state_tensors()

    def keep_state_of(self, names: Collection[str]) -> None:
        """Forget the state that is not among these names: that of parameters which had none then."""
        for name, parameter in self._parameters.items():
            if not any(f"{name}/{kind}" in names for kind in self._adam.state.get(parameter, {})):
                self._adam.state.pop(parameter, None)

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state_tensors` gave. Raises `CheckpointError` if the parameters are not the same."""
        state: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, kind = key.rpartition("/")
            state.setdefault(name, {})[kind] = tensor
        if unknown := state.keys() - self._parameters.keys():
            raise CheckpointError(
                f"the optimizer state holds parameters the model does not have: {sorted(unknown)[:3]}"
            )
        self._adam.state.clear()
        for name, kinds in state.items():
            parameter = self._parameters[name]
            self._adam.state[parameter] = {
                kind: divided_like(tensor, parameter).clone() for kind, tensor in kinds.items()
            }
