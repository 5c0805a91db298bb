"""The memory of a training pass, measured by running the trainer's own code on tensors without contents.

In: a model's configuration, the size of a micro-batch. Out: the peak of live bytes beyond weights and gradients, as
PyTorch would allocate them. The model is built, scored and differentiated in `FakeTensorMode`: operations compute only
shapes and types, and each storage counts while it is alive. Model families, checkpointing, autocast, adapters and the
chunks of the vocabulary are therefore exactly the trainer's, without formulas of their own.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Pack, pack
from sharpen.learning.trainer.scores import MAX_LOGITS
from sharpen.learning.trainer.varlen import TorchVarlen, Varlen
from sharpen.models.modules import decoder_of, skeleton
from sharpen.models.pieces import text_config
from sharpen.run.plan.sizes import WITHOUT_KEYS
from sharpen.types import Experience

_TRACED_LAYERS = 2
"""From the second layer on all layers of a kind take the same memory: at least so many, and one pattern of layers more,
show how much further layers take."""
_LONGEST_PATTERN = 12
"""The most layers of a pattern of recurrent and other layers that is looked for."""
_PARTS = 4
_READS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_TRACED_CHUNKS = 3
"""After this many chunks of the vocabulary, a further one takes no more memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward and backward pass: its computed tokens, how many of them carry loss, and how they are computed.

    `accumulates`: gradients exist before the pass; else the pass creates them, and they count. `flash`: attention is a
    GPU's flash kernel. `max_logits`: rows x vocabulary held at a time.
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


class _ConfigKey:
    """A cache key for a configuration: what is written of it."""

    def __init__(self, config: Any) -> None:
        self.config, self._written = config, config.to_json_string(use_diff=False)

    def __hash__(self) -> int:
        return hash(self._written)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ConfigKey) and self._written == other._written


def pass_bytes(config: Any, traced: Pass) -> int:
    """Return the peak memory of the pass in bytes, for the model that a Hugging Face configuration describes. Raises
    `ModelError` for a model whose code reads the values of its tensors."""
    if traced.lora is not None:  # packed weights cannot be traced, and live no longer
        traced = replace(traced, lora=traced.lora.model_copy(update={"base": "own"}))
    try:
        return _pass_bytes(_ConfigKey(config), traced)
    except _READS_VALUES as error:
        raise ModelError(
            f"cannot plan model type {config.model_type!r}: its code reads the values of tensors: {error!r}"
        ) from error


@functools.lru_cache(maxsize=128)
def _pass_bytes(key: _ConfigKey, traced: Pass) -> int:
    config, text = key.config, text_config(key.config)
    depth, length = int(text.num_hidden_layers), _pattern(text)
    few = length * -(-_TRACED_LAYERS // length)
    more = few + length
    shares_keys = getattr(text, "num_kv_shared_layers", None)  # the last layers, those of certain ones before them
    if depth <= more or shares_keys:
        return max(_peaks(config, traced, depth))
    pairs = zip(_peaks(config, traced, few), _peaks(config, traced, more), strict=True)
    return max(high + (high - low) * (depth - more) // (more - few) for low, high in pairs)


def _pattern(text: Any) -> int:
    """Return the number of layers after which recurrent and other layers, which take different memory, come in the same
    order again; `_TRACED_LAYERS` where they never do."""
    kinds = [kind in WITHOUT_KEYS for kind in getattr(text, "layer_types", None) or ()]
    lengths = range(1, _LONGEST_PATTERN + 1)
    return next((n for n in lengths if kinds[n:] == kinds[: len(kinds) - n]), _TRACED_LAYERS)


def _peaks(config: Any, traced: Pass, num_layers: int) -> list[int]:
    """Return the peaks of the pass's parts: forward, and backward of the vocabulary, the layers and the embeddings.
    Each is linear in the number of layers; which part is highest changes with it."""
    model = _model(skeleton(shallow(config, num_layers)), traced)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(model.module)
        model.device = torch.device("cpu")
        existing = list(model.module.parameters())
        for parameter in existing:
            if parameter.requires_grad and traced.accumulates:
                parameter.grad = torch.zeros_like(parameter)
        existing += [parameter.grad for parameter in existing if parameter.grad is not None]
        with LiveBytes(existing) as live:
            model.module.get_input_embeddings().register_forward_hook(live.mark_in_backward)
            decoder_of(model.module).register_forward_hook(live.mark_in_backward)
            packed = _one_sequence(traced, vocab_size=model.module.get_output_embeddings().weight.shape[0])
            scores = model.score(packed, entropy_gradient=traced.entropy_gradient)
            live.mark()
            (scores.logprobs_E.sum() + scores.entropy_E.sum()).backward()  # type: ignore[no-untyped-call]
    return [*live.peaks, *[0] * (_PARTS - len(live.peaks))]


def shallow(config: Any, num_layers: int) -> Any:
    """Return the configuration of a model that has only its first layers. Layers that share the keys of others are the
    last ones: they go first."""
    found = copy.deepcopy(config)
    text = text_config(found)
    depth, own = text.num_hidden_layers, text.to_dict().get("per_layer_config")  # what single layers have of their own
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == depth:  # of each layer
            setattr(text, name, value[:num_layers])
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = max(0, text.num_kv_shared_layers - (depth - num_layers))
    text.num_hidden_layers = num_layers
    if own:
        text.per_layer_config = {place: of for place, of in own.items() if int(place) < num_layers}
    return found


def _make_fake(module: torch.nn.Module) -> None:
    """Replace a meta module's weights by ones with a device, under the active mode; tied weights stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in made:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = torch.nn.Parameter(fake, requires_grad=parameter.requires_grad)
            part.register_parameter(name, made[id(parameter)])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))


class _UncheckedModel(TrainedModel):
    """The trained model without its comparisons of numbers, since there are none, and with a GPU's attention if
    requested."""

    def use(self, attention: Varlen | None) -> None:
        """Set the kernel for attention."""
        self._varlen = attention

    def _own_logits(self) -> torch.Tensor:
        return torch.empty(0)

    def _wrong_forward(self, own_NV: torch.Tensor) -> str:
        return ""


def _keep_as_flash(*tensors: Any, scale: float, **_: Any) -> torch.Tensor:
    """Keep what a flash kernel keeps: queries, keys, values and output in their compute type."""
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
    model: _UncheckedModel
    if traced.lora is None:
        model = _UncheckedModel(module, **settings)
    else:
        from sharpen.learning.trainer.lora import AdaptedModel

        class Adapted(_UncheckedModel, AdaptedModel):
            pass

        model = Adapted(module, lora=traced.lora, **settings)
    model.use(TorchVarlen(_keep_as_flash) if traced.flash else None)
    return model


def _one_sequence(traced: Pass, vocab_size: int) -> Pack:
    """Return a micro-batch of one sequence, whose last tokens carry loss."""
    length = traced.num_tokens
    chunk = max(1, traced.max_logits // vocab_size)
    num_loss = max(1, min(traced.num_loss_tokens, length - 1, _TRACED_CHUNKS * chunk))
    (packed,) = pack([blank(length, num_loss)], length)
    return packed


def blank(length: int, num_loss: int, name: str = "0") -> Experience:
    """Return a sequence of the same token, the last `num_loss` of which carry loss; `name` tells it from others."""
    mask_T = np.arange(length) >= length - num_loss
    zeros_T = np.zeros(length, np.float32)
    return Experience(
        rollout_id=name,
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


def _grouped_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the shape of a product by experts, rows (S, C) by (X, C, D), or in its backward pass (C, S) by (S, D).
    PyTorch's own rule for tensors without contents knows bfloat16 only, though it computes float32 as well."""
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (len(offs), a.shape[0], b.shape[1])
    return a.new_empty(shape)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments or results, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Iterable) and not isinstance(value, str):
            yield from _tensors(value)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of live storages, except the `known` ones; `peaks` has the maximum of each part, and a mark ends
    a part."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peaks = [0]
        self._live = {tensor.untyped_storage()._cdata for tensor in known}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here: a guard around each operation is a tenth of the pass

    def mark(self) -> None:
        """Begin the next part."""
        self.peaks.append(self.now)

    def mark_in_backward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook: begin the next part when the gradient of the module's output is computed."""
        first = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        if first.requires_grad:
            first.register_hook(lambda _: self.mark())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # half of the calls: the backward pass asks for each tensor's
            return args[0].fake_device
        tensors = [*_tensors((args, (kwargs or {}).values()))]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with _disable_current_modes():  # indices are real tensors, and some of their values are read
                return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._grouped_mm.default:
            out = _grouped_product(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in _tensors((out,)):
            if isinstance(tensor, FakeTensor):
                self._add(tensor)
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
