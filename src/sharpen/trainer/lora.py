"""LoRA: a policy that trains low-rank adapters on the linear layers of a frozen model (Hu et al. 2021), through peft.

In: a model directory and `trainer.lora`. Out: a `TrainedModel` whose parameters are the adapters alone, in fp32, and
which leaves as merged weights W + (alpha / rank) B A under their Hugging Face names, so that an engine need not know of
adapters. Switched off, the adapters leave the reference. There is no dropout: logprobs must be those of the model that
acts. Frozen linear layers are kept in the compute type, where autocast would round them to in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.errors import ConfigError
from sharpen.trainer.model import Scorer, TrainedModel, read_module, resolve_dtype
from sharpen.trainer.packing import Pack
from sharpen.trainer.scores import PackScores
from sharpen.trainer.sharding import whole

FOLDER = "adapter"
"""Where a checkpoint holds the adapters in peft's own format."""
_NAME = "default"


def load_trained(source: str | Path, config: TrainerConfig, device: torch.device) -> TrainedModel:
    """The model that is trained, with all its weights or with adapters, as `trainer.lora` says.

    Raises `ModelError` for architectures that are not supported, `ConfigError` for layers that the model has not got.
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
    """The model before training: the policy without its adapters, or else a second, frozen copy."""
    if isinstance(policy, AdaptedModel):
        return WithoutAdapters(policy)
    reference = TrainedModel.load(source, dtype=config.dtype, device=device)
    reference.freeze()
    return reference


class AdaptedModel(TrainedModel):
    """A frozen causal model together with the adapters that are trained."""

    def __init__(
        self,
        module: Any,
        *,
        lora: LoraConfig,
        compute_dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        max_logits: int | None = None,
    ) -> None:
        """Take over `module` and put adapters into it that change nothing yet (B is 0, A random)."""
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
        """Whether `state_tensors` gives the adapters alone, for an engine that loads them without merging."""
        if compute_dtype == torch.bfloat16:
            _round_frozen(module, compute_dtype)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The merged weights by their Hugging Face names (tied ones once). Weights with an adapter are new tensors, in
        the compute type; the others are the trainer's own memory. With `alone` the adapters, by peft's names.
        """
        return self._as_peft(dict(self.parameters())) if self.alone else super().state_tensors()

    def write_trained(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the adapters as peft does."""
        folder = directory / FOLDER
        folder.mkdir()
        by_name = {name: tensor.cpu().contiguous() for name, tensor in self._as_peft(tensors).items()}
        save_file(by_name, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self._peft_config(inference_mode=True).save_pretrained(str(folder))

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute without the adapters, as the model was before training."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def _as_peft(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The adapters by the names that they have in a `PeftModel`, and in its files."""
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
            target_modules=self.adapters["target_modules"],
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.module.config._name_or_path or None,
            inference_mode=inference_mode,
        )

    def acting(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The merged weights, and those without an adapter as they are."""
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
    """The frozen model beneath a policy's adapters, as its reference: no second copy of the weights."""

    def __init__(self, policy: AdaptedModel) -> None:
        self._policy = policy

    def score(self, pack: Pack) -> PackScores:
        """Logprobs and entropies of the pack's entries, without gradient."""
        with torch.no_grad(), self._policy.switched_off():
            return self._policy.score(pack)


def adapters_line(policy: TrainedModel) -> str:
    """How much of a model is trained, for the display; empty where all of it is."""
    if policy.adapters is None:
        return ""
    trained = sum(parameter.numel() for _, parameter in policy.parameters())
    frozen = sum(parameter.numel() for parameter in policy.module.parameters()) - trained
    return f"LoRA: adapters of rank {policy.adapters['rank']} with {trained:,} parameters, on {frozen:,} frozen ones"


def _targets(module: Any, lora: LoraConfig) -> list[str]:
    """Last names of the linear layers that get adapters."""
    head = module.get_output_embeddings()
    there = sorted(
        {
            name.rpartition(".")[2]
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and layer is not head
        }
    )
    unknown = sorted(set(lora.target_modules or ()) - set(there))
    if unknown or not there:
        raise ConfigError(
            f"trainer.lora.target_modules names {', '.join(unknown) or 'none'}, but the linear layers in the blocks of "
            f"this model ({module.config.model_type}) are {', '.join(there) or 'none that can have adapters'}"
        )
    return sorted(set(lora.target_modules or there))


def _round_frozen(module: Any, dtype: torch.dtype) -> None:
    """Keep frozen linear layers in `dtype`; not the embeddings, nor an output layer tied to them, nor norms, which
    autocast computes with as they are.
    """
    embeddings = module.get_input_embeddings().weight
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight is not embeddings and not layer.weight.requires_grad:
            layer.to(dtype)
