"""LoRA: trains low-rank adapters on the linear layers of a frozen model (Hu et al. 2021), with peft.

In: a model directory and `trainer.lora`. Out: a `TrainedModel` whose only parameters are the adapters, in fp32. Its
state tensors are the merged weights W + (alpha / rank) B A under their Hugging Face names, so engines need not support
adapters. With the adapters switched off, it is the reference. There is no dropout, since logprobs must equal the
engine's. Frozen linear layers are kept in the compute dtype, to which autocast would round them anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.errors import ConfigError
from sharpen.families.modules import decoder_of, has_towers
from sharpen.families.recurrent import mixers_of
from sharpen.families.routing import is_router
from sharpen.trainer.model import Scorer, TrainedModel, read_module, resolve_dtype
from sharpen.trainer.packing import Pack
from sharpen.trainer.scores import PackScores
from sharpen.trainer.sharding import whole

FOLDER = "adapter"
"""Folder of a checkpoint that holds the adapters in peft's format."""
_NAME = "default"


def load_trained(source: str | Path, config: TrainerConfig, device: torch.device) -> TrainedModel:
    """Load the policy, which trains all weights, or adapters if `trainer.lora` is set.

    Raises `ModelError` for unsupported architectures, `ConfigError` for target modules that the model does not have.
    """
    if config.lora is None:
        return TrainedModel.load(
            source, dtype=config.dtype, device=device, gradient_checkpointing=config.gradient_checkpointing
        )
    return AdaptedModel(
        read_module(source, device),
        lora=config.lora,
        compute_dtype=resolve_dtype(config.dtype, device),
        gradient_checkpointing=config.gradient_checkpointing,
    )


def load_reference(policy: TrainedModel, source: str | Path, config: TrainerConfig, device: torch.device) -> Scorer:
    """Return the model before training: the policy without its adapters, or a second, frozen copy."""
    if isinstance(policy, AdaptedModel):
        return WithoutAdapters(policy)
    reference = TrainedModel.load(source, dtype=config.dtype, device=device)
    reference.freeze()
    return reference


class AdaptedModel(TrainedModel):
    """A frozen causal model with trained adapters."""

    def __init__(
        self,
        module: Any,
        *,
        lora: LoraConfig,
        compute_dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        max_logits: int | None = None,
    ) -> None:
        """Take over `module` and add adapters, which have no effect at first (B is 0, A random)."""
        super().__init__(
            module, compute_dtype=compute_dtype, gradient_checkpointing=gradient_checkpointing, max_logits=max_logits
        )
        import peft  # takes seconds

        targets = _targets(module, lora)
        self.adapters = {"rank": lora.rank, "alpha": lora.alpha, "target_modules": targets}
        peft.inject_adapter_in_model(self._peft_config(), module, _NAME)
        self._layers = {
            name: layer for name, layer in module.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)
        }
        for layer in self._layers.values():
            layer.eval()
        self.alone = False
        """Whether `state_tensors` returns only the adapters, for an engine that loads them without merging."""
        if compute_dtype == torch.bfloat16:
            _round_frozen(module, compute_dtype)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the merged weights by their Hugging Face names, tied ones once. Weights with an adapter are new
        tensors in the compute dtype; others are not copied. With `alone`, return the adapters by peft's names.
        """
        return self._as_peft(dict(self.parameters())) if self.alone else super().state_tensors()

    def write_trained(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the adapters in peft's format."""
        folder = directory / FOLDER
        folder.mkdir()
        by_name = {name: tensor.cpu().contiguous() for name, tensor in self._as_peft(tensors).items()}
        save_file(by_name, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self._peft_config(inference_mode=True).save_pretrained(str(folder))

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
            self.module, dict(tensors), adapter_name=_NAME, save_embedding_layers=False
        )
        return {f"base_model.model.{name}": tensor.detach() for name, tensor in named.items()}

    def _peft_config(self, *, inference_mode: bool = False) -> Any:
        import peft

        assert self.adapters is not None
        return peft.LoraConfig(
            r=self.adapters["rank"],
            lora_alpha=self.adapters["alpha"],
            target_modules=_where(self.module, self.adapters["target_modules"]),
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.module.config._name_or_path or None,
            inference_mode=inference_mode,
        )

    def merge_adapters(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Merge the adapters into their weights; yield other weights as they are."""
        adapters = {name for name, _ in self.parameters()}
        adapted = {f"{name}.base_layer.weight": layer for name, layer in self._layers.items()}
        for name, tensor in named:
            if name in adapters:
                continue
            if name in adapted:
                tensor = self._merged(tensor, adapted[name])
            yield name.replace(".base_layer.", "."), tensor

    @torch.no_grad()
    def _merged(self, weight: torch.Tensor, layer: Any) -> torch.Tensor:
        down, up = whole(layer.lora_A[_NAME].weight), whole(layer.lora_B[_NAME].weight)
        merged: torch.Tensor = whole(weight) + layer.scaling[_NAME] * (up @ down)
        return merged.to(self.compute_dtype)


class WithoutAdapters:
    """A policy without its adapters, used as the reference, which needs no second copy of the weights."""

    def __init__(self, policy: AdaptedModel) -> None:
        self._policy = policy

    def score(self, pack: Pack) -> PackScores:
        """Return logprobs and entropies of the pack's entries, without gradient."""
        with torch.no_grad(), self._policy.switched_off():
            return self._policy.score(pack)


def adapters_line(policy: TrainedModel) -> str:
    """Return a line for the user on the number of trained parameters, or "" if all are trained."""
    if policy.adapters is None:
        return ""
    trained = sum(parameter.numel() for _, parameter in policy.parameters())
    frozen = sum(parameter.numel() for parameter in policy.module.parameters()) - trained
    return f"LoRA: adapters of rank {policy.adapters['rank']} with {trained:,} parameters, on {frozen:,} frozen ones"


_NO_OUT_PROJ = frozenset({"falcon_h1", "nemotron_h"})
"""Model types whose `out_proj` peft refuses."""


def _targets(module: Any, lora: LoraConfig) -> list[str]:
    """Return the last part of the names of the linear layers that get adapters."""
    head = module.get_output_embeddings()
    without = _without_adapters(module)
    linear = sorted(
        {
            name.rpartition(".")[2]
            for name, layer in decoder_of(module).named_modules()
            if isinstance(layer, nn.Linear) and layer is not head and not is_router(layer)
        }
        - without
    )
    unknown = sorted(set(lora.target_modules or ()) - set(linear))
    if not linear:
        raise ConfigError(
            f"trainer.lora: this model ({module.config.model_type}) has no linear layers in its blocks that could have "
            "adapters; leave trainer.lora out to train all weights"
        )
    if unknown:
        raise ConfigError(
            f"trainer.lora.target_modules names {', '.join(unknown)}, but the linear layers in the blocks of this "
            f"model ({module.config.model_type}) that can have adapters are {', '.join(linear)}"
        )
    return sorted(set(lora.target_modules or linear))


def _without_adapters(module: Any) -> set[str]:
    """Return the last part of the names of linear layers whose adapters would have no effect, or that peft refuses."""
    names = {"out_proj"} if module.config.model_type in _NO_OUT_PROJ else set()
    if any(hasattr(mixer.module, "dt_proj") for mixer in mixers_of(module)):
        names.add("dt_proj")  # Mamba 1 multiplies by its weight, and does not call the layer
    return names


def _where(module: Any, targets: list[str]) -> list[str] | str:
    """Return the target modules for peft: the last parts of their names; a pattern of whole names if the model has
    towers, whose layers may have the same."""
    if not has_towers(module.config):
        return targets
    decoder = next(name for name, part in module.named_modules() if part is decoder_of(module))
    return rf"{re.escape(decoder)}\..*\.({'|'.join(targets)})"


def _round_frozen(module: Any, dtype: torch.dtype) -> None:
    """Convert frozen linear layers to `dtype`, except an output layer tied to the embeddings. Embeddings and norms stay
    as they are, since autocast does not round them.
    """
    embeddings = module.get_input_embeddings().weight
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight is not embeddings and not layer.weight.requires_grad:
            layer.to(dtype)
