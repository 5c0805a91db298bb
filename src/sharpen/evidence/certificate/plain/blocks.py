"""A model whose weights are read from its files a block at a time: for one that is too large to be held whole in the
precision of the plain loop.

In: a module of transformers', and how a weight is made for a pass. Out: the same module, which has a block's weights
while it computes the block, and forgets them; the backward pass makes them again and computes the block's forward pass
once more (`torch.utils.checkpoint`). What is computed stays the same, and so does the module's own code.

Shape suffixes: T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
OfPass = Mapping[str, tuple[Tensor, ...]]
"""What a pass has in place of weights in the files, by their names: a weight, or the two matrices of its adapter."""

_ROWS = 2**14
"""Rows of the vocabulary whose logits are computed at a time."""


class Files:
    """The tensors in the safetensors files of a folder. What is read is mapped, and leaves memory with the tensor."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        types = set()
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    self._files[name] = file
                    types.add(opened.get_slice(name).get_dtype())
        self.dtype = _TYPES.get(types.pop()) if len(types) == 1 else None
        """The type of all of them, if they have one."""

    def has(self, names: Sequence[str]) -> bool:
        """Whether all these tensors are there."""
        return self._files.keys() >= set(names)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return these tensors."""
        found: dict[str, Tensor] = {}
        for file in {self._files[name] for name in names}:
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in names if self._files[name] == file}
        return found


_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Blocks:
    """The blocks of a module: the members of its lists of layers, and each part with weights outside of them."""

    def __init__(self, module: Any, files: Files, dtype: torch.dtype, made: Callable[[str, Tensor, OfPass], Tensor]):
        """`made` returns a weight in `dtype`, given its name, what the files hold, and what the pass has. Raises
        `ValueError` for a module whose weights are not those of the files, by their names, or not all in blocks."""
        self._files, self._dtype, self._made = files, dtype, made
        self._names = {id(one): name for name, one in module.named_parameters()}
        self._of_pass: OfPass = {}
        blocks = list(_blocks(module))
        inside = {id(one) for block in blocks for one in block.parameters()}
        if inside != self._names.keys() or not files.has([*self._names.values()]):
            raise ValueError("the weights are not those of the files, block by block")
        output = module.get_output_embeddings()
        for block in blocks:
            names = {own: self._names[id(one)] for own, one in block.named_parameters()}
            compute = self._block(block, names)
            if isinstance(block, nn.Embedding):
                compute = self._embedding(block, names["weight"], compute)
            elif block is output and type(block) is nn.Linear:
                compute = self._logits(block, names, compute)
            block.forward = compute

    @contextmanager
    def pass_with(self, weights: OfPass) -> Iterator[None]:
        """Compute within this with these weights, by name, in place of those in the files."""
        self._of_pass = weights
        try:
            yield
        finally:
            self._of_pass = {}

    def _block(self, block: Any, names: Mapping[str, str]) -> Callable[..., Any]:
        """Any block: all its weights are there while it computes."""
        inside = _Inside(block)

        def compute(*args: Any, **kwargs: Any) -> Any:
            of_pass = self._of_pass

            def with_weights(*args: Any, **kwargs: Any) -> Any:
                with torch.autocast("cpu", enabled=False):
                    files = self._files.read([*names.values()])
                    weights = {f"block.{own}": self._made(name, files[name], of_pass) for own, name in names.items()}
                    del files
                return functional_call(inside, weights, args, kwargs)

            return _forgetting(with_weights, *args, **kwargs)

        return compute

    def _embedding(self, block: Any, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        """Of a table that does not train, the rows of the ids that there are."""
        inside = _Inside(block)

        def compute(ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            if name in self._of_pass:
                return whole(ids, *args, **kwargs)
            own_VC, rows = self._files.read([name])[name], torch.unique(ids)
            kind = np.float64 if self._dtype == torch.float64 else np.float32
            table_VC = torch.from_numpy(np.zeros(own_VC.shape, kind))  # its rows take no memory until they are written
            table_VC[rows] = own_VC[rows].to(self._dtype)
            return functional_call(inside, {"block.weight": table_VC}, (ids, *args), kwargs)

        return compute

    def _logits(self, block: Any, names: Mapping[str, str], whole: Callable[..., Any]) -> Callable[..., Any]:
        """Of an output layer that does not train, some rows at a time."""

        def compute(hidden_TC: Tensor) -> Any:
            of_pass = self._of_pass
            if names.values() & of_pass.keys():
                return whole(hidden_TC)

            def some(hidden_TC: Tensor, start: int) -> Tensor:
                files = self._files.read([*names.values()])
                rows = {
                    own: self._made(name, files[name][start : start + _ROWS], of_pass) for own, name in names.items()
                }
                return nn.functional.linear(hidden_TC, rows["weight"], rows.get("bias"))

            starts = range(0, block.out_features, _ROWS)
            return torch.cat([_forgetting(some, hidden_TC, start) for start in starts], -1)

        return compute


class _Inside(nn.Module):
    """A block with the forward pass that it has by itself, and without hooks."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self._compute = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the block computes."""
        return self._compute(*args, **kwargs)


def _forgetting(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute, and keep for the backward pass nothing but the arguments."""
    if not torch.is_grad_enabled():
        return compute(*args, **kwargs)
    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _blocks(module: Any) -> Iterator[Any]:
    for child in module.children():
        has_list = any(isinstance(part, nn.ModuleList) for part in child.modules())
        if has_list and not isinstance(module, nn.ModuleList):
            yield from _blocks(child)
        elif next(child.parameters(), None) is not None:
            yield child
