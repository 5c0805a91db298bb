"""LoRA: trains low-rank adapters on the linear layers of a frozen model (Hu et al. 2021), with peft.

In: a model directory and `trainer.lora`. Out: a `TrainedModel` whose only parameters are the adapters, in fp32. Its
state tensors are the merged weights W + (alpha / rank) B A under their Hugging Face names, so engines need not support
adapters. With the adapters switched off, it is the reference. There is no dropout, since logprobs must equal the
engine's. Frozen linear layers are kept in the compute dtype, to which autocast would round them anyway; with
`base: shared` or `nf4` they are the engine's own, which serves them with the adapters beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.learning.trainer.model import (
    TrainedModel,
    kind_of,
    read_frozen_module,
    resolve_dtype,
    round_frozen,
)
from sharpen.learning.trainer.sharding import whole
from sharpen.models.adapters import ADAPTER, adapted_layers, add_adapters, is_of_experts, peft_config
from sharpen.models.experts import expert_update, experts_of
from sharpen.models.frozen import Served
from sharpen.models.nf4 import NF4Linear

FOLDER = "adapter"
"""Folder of a checkpoint that holds the adapters in peft's format."""


def load_trained(
    source: str | Path,
    config: TrainerConfig,
    device: torch.device,
    served: Served | None = None,
) -> TrainedModel:
    """Load the policy, which trains all weights, or adapters if `trainer.lora` is set. `served`: what an engine in
    this process has for both.

    Raises `ModelError` for unsupported architectures, `ConfigError` for target modules that the model does not have.
    """
    if config.lora is None:
        return TrainedModel.load(
            source,
            dtype=config.dtype,
            device=device,
            gradient_checkpointing=config.gradient_checkpointing,
            offload_activations=config.offload_activations,
            train_towers=config.train_towers,
        )
    first = device if config.lora.base == "own" else torch.device("cpu")  # a GPU never holds them in fp32
    dtype = resolve_dtype(config.dtype, device)
    model = AdaptedModel(
        read_frozen_module(source, dtype, first, config.lora, served),
        lora=config.lora,
        compute_dtype=dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        offload_activations=config.offload_activations,
    )
    model.move_to(device)
    return model


class AdaptedModel(TrainedModel):
    """A frozen causal model with trained adapters."""

    def __init__(
        self,
        module: Any,
        *,
        lora: LoraConfig,
        compute_dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        offload_activations: bool = False,
        max_logits: int | None = None,
    ) -> None:
        """Take over `module` and add adapters, which have no effect at first (B is 0, A random)."""
        super().__init__(
            module,
            compute_dtype=compute_dtype,
            gradient_checkpointing=gradient_checkpointing,
            offload_activations=offload_activations,
            max_logits=max_logits,
        )
        self.adapters = add_adapters(module, lora, torch.float32)
        self._layers = adapted_layers(module)
        self.alone = False
        """Whether `state_tensors` returns only the adapters, for an engine that loads them without merging."""
        if compute_dtype == torch.bfloat16:
            round_frozen(module, compute_dtype)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the merged weights by their Hugging Face names, tied ones once. Weights with an adapter are new
        tensors in the compute dtype; others are not copied. With `alone`, return the adapters by peft's names.
        """
        return self._as_peft(dict(self.parameters())) if self.alone else super().state_tensors()

    def share_base(
        self,
        layers: Mapping[str, Any],
        experts: Mapping[str, torch.nn.Module],
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        """Use the engine's frozen layers, experts and other `weights` of the same type, by name, in place of those that
        were loaded here."""
        for name, layer in self._layers.items():
            if not is_of_experts(layer):
                layer.base_layer = layers[name].base_layer
        for name, part in experts_of(self.module).items():
            for weight, shared in list(experts[name].named_parameters(recurse=False)):
                setattr(part, weight, shared)
        for name, parameter in self.module.named_parameters():
            other = weights.get(name)
            if other is not None and not parameter.requires_grad and kind_of(other) == kind_of(parameter.data):
                parameter.data = other

    def write_trained(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the adapters in peft's format."""
        folder = directory / FOLDER
        folder.mkdir()
        by_name = {name: tensor.cpu().contiguous() for name, tensor in self._as_peft(tensors).items()}
        save_file(by_name, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        peft_config(self.module, self.adapters or {}, inference_mode=True).save_pretrained(str(folder))

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute without the adapters inside this block, as before training. A mixture of experts then chooses its
        experts by itself."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        self.replays = False
        try:
            yield
        finally:
            self.replays = True
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def _as_peft(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the adapters by their names in a `PeftModel` and its files."""
        import peft

        named = peft.get_peft_model_state_dict(
            self.module, dict(tensors), adapter_name=ADAPTER, save_embedding_layers=False
        )
        return {f"base_model.model.{name}": tensor.detach() for name, tensor in named.items()}

    def merge_adapters(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Merge the adapters into their weights; yield other weights as they are."""
        adapters = {name for name, _ in self.parameters()}
        adapted = {_plain(_weight_name(name, layer)): layer for name, layer in self._layers.items()}
        for name, tensor in named:
            if name in adapters:
                continue
            plain = _plain(name)
            yield plain, self._merged(tensor, adapted[plain]) if plain in adapted else tensor

    @torch.no_grad()
    def _merged(self, weight: torch.Tensor, layer: Any) -> torch.Tensor:
        down, up = whole(layer.lora_A[ADAPTER].weight), whole(layer.lora_B[ADAPTER].weight)
        if is_of_experts(layer):
            merged: torch.Tensor = whole(weight) + expert_update(layer, down, up)
            return merged.to(self.compute_dtype)
        base = layer.base_layer
        before = base.whole() if isinstance(base, NF4Linear) else whole(weight)
        merged = before + layer.scaling[ADAPTER] * (up @ down)
        return merged.to(self.compute_dtype)


def _weight_name(name: str, layer: Any) -> str:
    """Return the name of the weight that a layer adapts."""
    return f"{name}.base_layer.{layer.parameter_name if is_of_experts(layer) else 'weight'}"


def _plain(name: str) -> str:
    """Return the name that a tensor has in the model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def adapters_line(policy: TrainedModel) -> str:
    """Return a line for the user on the number of trained parameters, or "" if all are trained."""
    if policy.adapters is None:
        return ""
    trained = sum(parameter.numel() for _, parameter in policy.parameters())
    packed = [one for one in policy.module.modules() if isinstance(one, NF4Linear)]
    in_4_bits = sum(one.in_features * one.out_features for one in packed)
    bytes_of_them = sum(one.weight.numel() for one in packed)
    frozen = sum(one.numel() for one in policy.module.parameters()) - trained - bytes_of_them + in_4_bits
    return (
        f"LoRA: adapters of rank {policy.adapters['rank']} with {trained:,} parameters, on {frozen:,} frozen ones"
        + (f", {in_4_bits:,} of them in 4 bits" if in_4_bits else "")
    )
