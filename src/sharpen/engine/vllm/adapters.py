"""LoRA adapters that vLLM loads without merging, with a folder and a LoRA request for each policy version.

In: adapters under the parameter names of peft's files. Out: `Adapter`s, whose `request` is passed with each generation.
Requests of different versions run at the same time; vLLM's prefix cache separates their KV by the adapter's name and
folder.

The first version has adapters of zeros, so that every request has an adapter: on a CPU, vLLM 0.32 computes rows without
one wrongly if rows with one are in the same batch (logprobs were off by several units).
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sharpen.config.trainer import LoraConfig
from sharpen.models.adapters import adapter_shapes, check_adapters

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM can be started with; smaller ranks are padded."""


@dataclass(slots=True, kw_only=True, eq=False)
class Adapter:
    """The adapters of one policy version; `running` counts the requests that use them."""

    version: int
    request: Any
    folder: Path
    running: int = 0


class Adapters:
    """The adapters of one engine, stored on disk."""

    def __init__(self, folder: Path, skeleton: Any, lora: LoraConfig, dtype: torch.dtype) -> None:
        """Adapters have the shapes of those that the trainer puts into `skeleton`, a model on the meta device.
        Files are kept in `folder`."""
        self._folder = folder
        self._lora = lora
        self._dtype = dtype
        self._shapes = adapter_shapes(skeleton, lora)
        self._held: list[Adapter] = []
        self._count = 0

    def zeros(self, version: int) -> Adapter:
        """Write adapters of zeros, which do not change the model."""
        return self.write(version, {name: torch.zeros(shape) for name, shape in self._shapes.items()})

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Adapter:
        """Write adapters in peft's format. Raises `ModelError`, with nothing written, unless names and shapes are
        exactly those of the configured layers."""
        check_adapters(self._shapes, tensors)
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        self._count += 1
        folder = self._folder / f"adapter-{self._count}"
        folder.mkdir()
        content = {name: tensor.detach().to("cpu", self._dtype).contiguous() for name, tensor in tensors.items()}
        save_file(content, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(
            json.dumps(
                {
                    "peft_type": "LORA",
                    "task_type": "CAUSAL_LM",
                    "r": self._lora.rank,
                    "lora_alpha": self._lora.alpha,
                    "target_modules": sorted({_layer(name).rpartition(".")[2] for name in self._shapes}),
                    "bias": "none",
                }
            )
        )
        request = LoRARequest(f"version-{version}-{self._count}", self._count, str(folder))
        adapter = Adapter(version=version, request=request, folder=folder)
        self._held.append(adapter)
        return adapter

    def remove_unused(self, current: Adapter) -> list[Adapter]:
        """Delete the adapters, except `current`, that no running request uses, and return them."""
        unused = [one for one in self._held if one is not current and one.running == 0]
        self._held = [one for one in self._held if one not in unused]
        for one in unused:
            shutil.rmtree(one.folder)
        return unused


@contextlib.contextmanager
def in_use(adapter: Adapter | None) -> Iterator[None]:
    """Count a running request of these adapters during a block."""
    if adapter is None:
        yield
        return
    adapter.running += 1
    try:
        yield
    finally:
        adapter.running -= 1


def max_rank(lora: LoraConfig) -> int:
    """Return the maximum rank to start vLLM with, at least the configured rank."""
    return next(rank for rank in RANKS if rank >= lora.rank)


def _layer(name: str) -> str:
    return name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
