"""Memory of a training pass that is never computed: the trainer's own code over tensors without contents.

In: a model's configuration, the size of a micro-batch. Out: the most bytes that live at once beyond weights and
gradients, as PyTorch would allocate them. The model is built, scored and differentiated in `FakeTensorMode`: every
operation works out shapes and types alone, and a storage counts from its making to its end. So every family of models,
checkpointing, autocast, adapters and the chunks of the vocabulary are as the trainer has them, without a formula of
their own.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.trainer.model import TrainedModel
from sharpen.trainer.packing import Pack, pack
from sharpen.trainer.scores import MAX_LOGITS
from sharpen.trainer.varlen import TorchVarlen, Varlen
from sharpen.types import Experience

_TRACED_LAYERS = (2, 4)
"""Every layer takes the same from the second on: two depths tell what one more takes."""
_PARTS = 4
_LOOKS_AT_CONTENTS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_TRACED_CHUNKS = 3
"""Chunks of the vocabulary after which a further one takes no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward and backward pass: computed tokens, how many of them carry loss, and how they are computed.

    `accumulates`: gradients are there before; else they are made in this pass and count. `flash`: attention is that of
    a GPU's kernel. `max_logits`: rows x vocabulary held at a time.
    """

    num_tokens: int
    num_loss_tokens: int
    bfloat16: bool
    checkpointing: bool = False
    entropy_gradient: bool = False
    lora: LoraConfig | None = None
    accumulates: bool = True
    flash: bool = False
    max_logits: int = MAX_LOGITS


class _Same:
    """A configuration as a key: the object itself, whatever it holds."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.config is other.config


def pass_bytes(config: Any, traced: Pass) -> int:
    """Peak memory of the pass, in bytes, for the model that a Hugging Face configuration describes. Raises `ModelError`
    for a model that looks at what its tensors hold."""
    try:
        return _pass_bytes(_Same(config), traced)
    except _LOOKS_AT_CONTENTS as error:
        raise ModelError(f"model type {config.model_type!r} cannot be run without contents: {error!r}") from error


@functools.lru_cache(maxsize=128)
def _pass_bytes(of: _Same, traced: Pass) -> int:
    config = of.config
    depth = int(config.num_hidden_layers)
    few, more = _TRACED_LAYERS
    if depth <= more:
        return max(_peaks(config, traced, depth))
    of_few, of_more = (_peaks(config, traced, layers) for layers in _TRACED_LAYERS)
    pairs = zip(of_few, of_more, strict=True)
    return max(high + (high - low) * (depth - more) // (more - few) for low, high in pairs)


def _peaks(config: Any, traced: Pass, num_layers: int) -> list[int]:
    """Peaks of the pass's parts: forward, backward of the vocabulary, of the layers, of the embeddings. Each part's is
    linear in the number of layers; which part has the highest changes with it."""
    from transformers import AutoModelForCausalLM

    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = num_layers
    if getattr(shallow, "layer_types", None):
        shallow.layer_types = shallow.layer_types[:num_layers]
    with torch.device("meta"):
        model = _model(AutoModelForCausalLM.from_config(shallow, dtype=torch.float32), traced)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(model.module)
        model.device = torch.device("cpu")
        there = list(model.module.parameters())
        for parameter in there:
            if parameter.requires_grad and traced.accumulates:
                parameter.grad = torch.zeros_like(parameter)
        there += [parameter.grad for parameter in there if parameter.grad is not None]
        with LiveBytes(there) as live:
            model.module.get_input_embeddings().register_forward_hook(live.mark_in_backward)
            model.module.get_decoder().register_forward_hook(live.mark_in_backward)
            packed = _one_sequence(traced, vocab_size=model.module.get_output_embeddings().weight.shape[0])
            scores = model.score(packed, entropy_gradient=traced.entropy_gradient)
            live.mark()
            (scores.logprobs_E.sum() + scores.entropy_E.sum()).backward()  # type: ignore[no-untyped-call]
    return [*live.peaks, *[0] * (_PARTS - len(live.peaks))]


def _make_fake(module: torch.nn.Module) -> None:
    """Give the weights of a module on the meta device a device, under the mode that is on; tied ones stay one."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in made:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = torch.nn.Parameter(fake, requires_grad=parameter.requires_grad)
            part.register_parameter(name, made[id(parameter)])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))


class _Unchecked(TrainedModel):
    """Without the comparisons of numbers, since there are none; with a GPU's kind of attention where asked."""

    def use(self, attention: Varlen | None) -> None:
        """Set the kernel for attention."""
        self._varlen = attention

    def _own_logits(self) -> torch.Tensor:
        return torch.empty(0)

    def _wrong_forward(self, own_NV: torch.Tensor) -> str:
        return ""


def _keep_as_flash(*tensors: Any, scale: float, **_: Any) -> torch.Tensor:
    """Keeps what a flash kernel keeps: queries, keys, values and output in the type that they are computed in."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in tensors[:3])
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def _model(module: Any, traced: Pass) -> TrainedModel:
    dtype = torch.bfloat16 if traced.bfloat16 else torch.float32
    settings: dict[str, Any] = {
        "compute_dtype": dtype,
        "gradient_checkpointing": traced.checkpointing,
        "max_logits": traced.max_logits,
    }
    model: _Unchecked
    if traced.lora is None:
        model = _Unchecked(module, **settings)
    else:
        from sharpen.trainer.lora import AdaptedModel

        class Adapted(_Unchecked, AdaptedModel):
            pass

        model = Adapted(module, lora=traced.lora, **settings)
    model.use(TorchVarlen(_keep_as_flash) if traced.flash else None)
    return model


def _one_sequence(traced: Pass, vocab_size: int) -> Pack:
    """A micro-batch of one sequence, the last tokens of which carry loss."""
    length = traced.num_tokens
    chunk = max(1, traced.max_logits // vocab_size)
    num_loss = max(1, min(traced.num_loss_tokens, length - 1, _TRACED_CHUNKS * chunk))
    mask_T = np.arange(length) >= length - num_loss
    zeros_T = np.zeros(length, np.float32)
    one = Experience(
        rollout_id="0",
        group_id="0",
        task_id="0",
        ids_T=np.zeros(length, np.int32),
        loss_mask_T=mask_T,
        logprobs_T=zeros_T,
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        calls_T=np.where(mask_T, 0, -1).astype(np.int32),
        temperatures_T=np.ones(length, np.float32),
        advantages_T=zeros_T,
        weights_T=zeros_T,
    )
    (packed,) = pack([one], length)
    return packed


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that live, but for those `known` before; `peaks` is the most there was at once in each part,
    where a mark ends one."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peaks = [0]
        self._live = {tensor.untyped_storage()._cdata for tensor in known}

    def mark(self) -> None:
        """Begin another part."""
        self.peaks.append(self.now)

    def mark_in_backward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """As a forward hook: begin another part when the gradient of the module's output is there."""
        first = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        if first.requires_grad:
            first.register_hook(lambda _: self.mark())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            with _disable_current_modes():  # indices have contents, and some are looked at
                return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, FakeTensor):
                self._add(leaf)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        self._live.add(key)
        self.now += size
        self.peaks[-1] = max(self.peaks[-1], self.now)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size
