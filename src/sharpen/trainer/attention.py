"""Attention over a pack's prefix tree, plugged into any Hugging Face model through transformers' `AttentionInterface`.

In: queries, keys and values of the computed tokens of a pack, and its `TreeLayout`. Out: the attention outputs. Each
token attends to its segment's ancestors and to its own segment up to itself, never to another branch. Nothing is
padded.

There are three implementations with the same result. `_Cascade` (CPU) makes two calls per segment, in which its keys
meet its own queries (causal) and all queries of its descendants, which are one range; the partial results are merged by
their log-sum-exp. `varlen` (GPU, half precision) makes one kernel call for all segments. `_per_segment` (otherwise, or
if a sliding window is shorter than the sequences) makes one call per segment, with the keys of its whole path.

Shape suffixes: H heads, K key/value heads, N computed tokens of a pack, L tokens of a segment, S keys of a path, D head
size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sharpen.errors import ModelError
from sharpen.trainer.packing import Segment
from sharpen.trainer.recurrence import Calls
from sharpen.trainer.varlen import Paths, TorchVarlen, Varlen, check_kernel, torch_varlen, varlen_attention

NAME = "sharpen_tree"
"""Value of `config._attn_implementation`. No mask function has this name, so transformers creates no mask."""


class TreeLayout:
    """Which tokens of a pack attend to which. `positions_N` are positions within the sequences; `varlen` is the kernel
    to use if possible."""

    def __init__(self, segments: Sequence[Segment], positions_N: torch.Tensor, *, varlen: Varlen | None = None) -> None:
        self.segments = tuple(segments)
        self.positions_N = positions_N
        self.paths = tuple(self._path(number) for number in range(len(self.segments)))
        # Computed from lengths, since reading the largest position would wait for the GPU.
        self.max_position = max(sum(self._length(part) for part in path) for path in self.paths) - 1
        self.varlen = varlen
        self._calls: dict[bool, Calls] = {}

    def recurrent_calls(self, *, continues: bool) -> Calls:
        """The calls of recurrent layers, planned once for all layers that can go on from a state, or cannot."""
        if continues not in self._calls:
            self._calls[continues] = Calls.of(self.segments, self.positions_N.device, continues=continues)
        return self._calls[continues]

    def _length(self, number: int) -> int:
        return self.segments[number].stop - self.segments[number].start

    @functools.cached_property
    def kernel_paths(self) -> Paths:
        """The paths in the kernel's format, computed once for all layers."""
        return Paths.of(self.segments, self.paths, self.positions_N.device)

    def _path(self, number: int) -> tuple[int, ...]:
        """Return the segment numbers from the first ancestor to the segment itself."""
        path = [number]
        while (parent := self.segments[path[-1]].parent) is not None:
            path.append(parent)
        return tuple(reversed(path))

    def mask_LS(self, number: int, window: int | None) -> torch.Tensor:
        """Return which keys of its path a segment's queries see. Positions increase along a path, so they decide."""
        positions = [
            self.positions_N[self.segments[part].start : self.segments[part].stop] for part in self.paths[number]
        ]
        distance_LS = positions[-1][:, None] - torch.cat(positions)[None, :]
        seen_LS = distance_LS >= 0
        return seen_LS if window is None else seen_LS & (distance_LS < window)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    tree: TreeLayout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers, which calls this in each layer: query (1, H, N, D), key and value
    (1, K, N, D) give (1, N, H, D).

    Dropout is never applied, since logprobs must equal the engine's. Raises `ModelError` for unsupported kinds of
    attention.
    """
    if softcap is not None or s_aux is not None or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} uses soft-capped logits, sinks or its own mask, which training does not support"
        )
    dtype = value.dtype
    windowed = sliding_window is not None and tree.max_position >= sliding_window
    if query.device.type == "cpu" and not windowed and tree.varlen is None:
        # In bfloat16 the fused backward pass on a CPU takes several times as long.
        exact = torch.promote_types(dtype, torch.float32)
        out = _Cascade.apply(query.to(exact), key.to(exact), value.to(exact), tree, scaling)  # type: ignore[no-untyped-call]
        out = out.to(dtype)
    elif tree.varlen is not None and dtype in tree.varlen.dtypes:
        window = sliding_window if windowed else None
        query, key = query.to(dtype), key.to(dtype)
        out = varlen_attention(tree.varlen, query, key, value, tree.kernel_paths, scaling, window)
    else:
        out = _per_segment(query.to(dtype), key.to(dtype), value, tree, scaling, sliding_window if windowed else None)
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, tree_attention)


def choose_varlen(config: Any, compute_dtype: torch.dtype, device: torch.device) -> tuple[Varlen | None, str]:
    """Return the attention kernel for a model on a device, if any, and a line for the user: what is used, and why.

    The kernel is first compared with `_per_segment` on a small tree with the model's numbers of heads.
    """
    if device.type != "cuda":
        return None, ""
    plain = "training attention: segment by segment"
    if compute_dtype not in TorchVarlen.dtypes:
        return None, f"{plain} (flash kernels compute in half precision, and trainer.dtype is float32)"
    kernel = torch_varlen()
    if isinstance(kernel, str):
        return None, f"{plain} ({kernel})"
    wrong = check_varlen(kernel, config, device)
    if wrong:
        return None, f"{plain} (PyTorch's variable-length kernel cannot be used: {wrong})"
    return kernel, "training attention: PyTorch's variable-length flash kernel"


def check_varlen(kernel: Varlen, config: Any, device: torch.device) -> str:
    """Check a kernel with a model's numbers of heads on a tree of four segments. Return what is wrong, or ""."""
    ends = [(0, 70, 300, None), (70, 135, 200, 0), (135, 200, 200, 1), (200, 300, 300, 0)]
    segments = [Segment(start=a, stop=b, subtree_stop=end, parent=parent) for a, b, end, parent in ends]
    positions_N = torch.from_numpy(np.concatenate([np.arange(200), np.arange(70, 170)]))
    tree = TreeLayout(segments, positions_N.to(device))
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for window in (None, 50):
        wrong = check_kernel(
            kernel,
            lambda query, key, value, scale, window: _per_segment(query, key, value, tree, scale, window),
            tree.kernel_paths,
            num_tokens=300,
            heads=(heads, kv_heads),
            head_dim=head_dim,
            window=window,
            device=device,
        )
        if wrong:
            return wrong
    return ""


def _per_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: TreeLayout, scale: float, window: int | None
) -> torch.Tensor:
    if query.is_cuda and query.shape[1] != key.shape[1]:
        # With fewer key heads, no fused GPU kernel supports a mask or fp32: the fallback would hold all scores at once.
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    lengths = [segment.stop - segment.start for segment in tree.segments]
    queries, keys, values = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    outs = []
    for number, path in enumerate(tree.paths):
        plain = len(path) == 1 and window is None
        out = scaled_dot_product_attention(
            queries[number],
            torch.cat([keys[part] for part in path], dim=2),
            torch.cat([values[part] for part in path], dim=2),
            attn_mask=None if plain else tree.mask_LS(number, window),
            is_causal=plain,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outs.append(out)
    return torch.cat(outs, dim=2)


_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@contextmanager
def _fused_precision() -> Iterator[None]:
    """Use PyTorch's default matmul precision: with "medium", the small products in the fused kernel are 4 times
    slower."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Cascade(torch.autograd.Function):
    """Partial attention per segment, merged by log-sum-exp.

    Given the merged output and log-sum-exp, the backward pass of each part is that of plain attention: its
    probabilities are exp(score - lse), independent of the other parts.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: TreeLayout, scale: float
    ) -> torch.Tensor:
        _, num_heads, num_tokens, head_size = query.shape
        # Token-major, the layout that the output projection reads.
        out = query.new_empty(1, num_tokens, num_heads, head_size).transpose(1, 2)
        lse = query.new_empty(1, num_heads, num_tokens)
        with _fused_precision():
            for queries, keys, causal in _parts(tree):
                part, part_lse = _attend(
                    query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, causal, scale=scale
                )
                if causal:
                    out[:, :, queries], lse[:, :, queries] = part, part_lse
                else:
                    _merge(out[:, :, queries], lse[:, :, queries], part, part_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        with _fused_precision():
            for queries, keys, causal in _parts(ctx.tree):
                parts = _attend_backward(
                    grad_out[:, :, queries],
                    query[:, :, queries],
                    key[:, :, keys],
                    value[:, :, keys],
                    out[:, :, queries],
                    lse[:, :, queries],
                    0.0,
                    causal,
                    scale=ctx.scale,
                )
                for grad, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
                    grad[:, :, where] += part
        return (*grads, None, None)


def _parts(tree: TreeLayout) -> list[tuple[slice, slice, bool]]:
    """Return (query range, key range, causal) of each part. A segment's own queries come first, and are causal."""
    own = [(slice(s.start, s.stop), slice(s.start, s.stop), True) for s in tree.segments]
    below = [
        (slice(s.stop, s.subtree_stop), slice(s.start, s.stop), False) for s in tree.segments if s.subtree_stop > s.stop
    ]
    return own + below


def _merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a part into `out` and `lse`, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(part, (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)
