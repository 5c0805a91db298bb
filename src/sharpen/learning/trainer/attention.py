"""Attention over a pack's prefix tree, plugged into any Hugging Face model through transformers' `AttentionInterface`.

In: queries, keys and values of the computed tokens of a pack, and its `TreeLayout`. Out: the attention outputs. Each
token attends to its segment's ancestors and to its own segment up to itself, never to another branch. Nothing is
padded.

There are three implementations with the same result. `cascade` (CPU, and everywhere for soft-capped scores and sinks)
computes parts that it merges. `varlen` (GPU, half precision) makes one kernel call for all segments. `_per_segment`
(otherwise) makes one call per segment with the keys of its whole path, or per block of queries with a sliding window.

Shape suffixes: H heads, K key/value heads, N computed tokens of a pack, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sharpen.errors import ModelError
from sharpen.learning.trainer.cascade import (
    AttentionPart,
    Cascade,
    block_for,
    chunked,
    descendants,
    full_parts,
    window_parts,
)
from sharpen.learning.trainer.packing import Segment
from sharpen.learning.trainer.recurrence import Calls
from sharpen.learning.trainer.varlen import Paths, TorchVarlen, Varlen, check_kernel, torch_varlen, varlen_attention
from sharpen.models.blockwise import Scores
from sharpen.models.marks import BothWays, Shown
from sharpen.models.pieces import Piece, text_config
from sharpen.models.table import needs_of
from sharpen.models.windows import chunk_of, scaled_queries

NAME = "sharpen_tree"
"""Value of `config._attn_implementation`. No mask function has this name, so transformers creates no mask."""


class TreeLayout:
    """Which tokens of a pack attend to which. `positions_N` are positions within the sequences; `varlen` is the kernel
    to use if possible."""

    def __init__(
        self,
        segments: Sequence[Segment],
        positions_N: torch.Tensor,
        *,
        varlen: Varlen | None = None,
        shown: Sequence[Shown] = (),
        both_ways: BothWays = "",
        is_cut: bool = False,
    ) -> None:
        """`both_ways`: in which layers the tokens of each of the `shown` images attend to each other both ways.
        `is_cut`: the segments are those of a tree that was cut into chunks."""
        self.segments = tuple(segments)
        self.both_ways = both_ways
        self.shown = tuple(shown) if both_ways else ()
        self.positions_N = positions_N
        self.paths = tuple(self._path(number) for number in range(len(self.segments)))
        # Computed from lengths, since reading the largest position would wait for the GPU.
        self.max_position = max(sum(self._length(part) for part in path) for path in self.paths) - 1
        self.varlen = varlen
        self.below: Sequence[Sequence[slice]] = [[slice(one.stop, one.subtree_stop)] for one in self.segments]
        if is_cut:
            self.below = descendants(self.segments, self.paths)
        self._calls: dict[bool, Calls] = {}
        self._in_chunks: dict[int, TreeLayout] = {}
        self._parts: dict[tuple[int | None, tuple[int, int] | None, torch.dtype], tuple[AttentionPart, ...]] = {}

    def recurrent_calls(self, *, continues: bool) -> Calls:
        """The calls of recurrent layers, planned once for all layers that can go on from a state, or cannot."""
        if continues not in self._calls:
            self._calls[continues] = Calls.of(self.segments, self.positions_N.device, continues=continues)
        return self._calls[continues]

    def in_chunks(self, size: int) -> TreeLayout:
        """Return the tree cut into chunks of `size` positions, computed once for all layers."""
        if self.max_position < size:
            return self
        if size not in self._in_chunks:
            cut = chunked(self.segments, size)
            self._in_chunks[size] = TreeLayout(cut, self.positions_N, varlen=self.varlen, is_cut=True)
        return self._in_chunks[size]

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

    @functools.cached_property
    def blocks(self) -> tuple[tuple[slice, torch.Tensor], ...]:
        """The images whose tokens attend both ways: their tokens, and the indices of all keys up to their last one."""
        starts = [segment.start for segment in self.segments]
        blocks = []
        for one in self.shown:
            rows = slice(int(one.rows_N[0]), int(one.rows_N[-1]) + 1)
            path = self.paths[int(np.searchsorted(starts, rows.start, side="right")) - 1]
            parts = [np.arange(self.segments[part].start, self.segments[part].stop) for part in path[:-1]]
            keys = np.concatenate([*parts, np.arange(self.segments[path[-1]].start, rows.stop)])
            blocks.append((rows, torch.from_numpy(keys).to(self.positions_N.device)))
        return tuple(blocks)

    def parts(self, window: int | None, query: torch.Tensor, scores: Scores) -> tuple[AttentionPart, ...]:
        """Return the parts of `cascade`, computed once for all layers of a kind."""
        block = block_for(query, scores)
        key = (window, block, query.dtype)
        if key not in self._parts:
            self._parts[key] = tuple(
                full_parts(self.segments, self.below, block)
                if window is None
                else window_parts(self.segments, self.paths, window, query)
            )
        return self._parts[key]


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
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} uses its own attention mask, which training does not support")
    if (chunk := chunk_of(module)) is not None:
        tree = tree.in_chunks(chunk)
    query = scaled_queries(module, query, tree.positions_N)
    dtype, value_size = value.dtype, value.shape[-1]
    window = sliding_window if sliding_window is not None and tree.max_position >= sliding_window else None
    scores = Scores(scale=scaling, softcap=softcap)
    width = max(query.shape[-1], value_size)
    query, key, value = (_widened(tensor, width) for tensor in (query, key, value))
    blocked = softcap is not None or s_aux is not None
    if blocked or (query.device.type == "cpu" and tree.varlen is None):
        # In bfloat16 the fused backward pass on a CPU takes several times as long.
        exact = torch.promote_types(dtype, torch.float32)
        query, key, value = query.to(exact), key.to(exact), value.to(exact)
        parts = tree.parts(window, query, scores)
        out = Cascade.apply(query, key, value, s_aux, parts, scores).to(dtype)  # type: ignore[no-untyped-call]
    elif tree.varlen is not None and dtype in tree.varlen.dtypes:
        query, key = query.to(dtype), key.to(dtype)
        out = varlen_attention(tree.varlen, query, key, value, tree.kernel_paths, scaling, window)
    else:
        out = _per_segment(query.to(dtype), key.to(dtype), value, tree, scaling, window)
    if tree.both_ways == "everywhere" or (tree.both_ways and sliding_window is not None):
        out = _both_ways(out, query, key, value, tree, scores, window)
    return out[..., :value_size].transpose(1, 2), None


def _both_ways(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeLayout,
    scores: Scores,
    window: int | None,
) -> torch.Tensor:
    """Compute anew the tokens of images, which see the later ones of their image too."""
    if scores.softcap is not None:
        raise ModelError("soft-capped attention has no images whose tokens attend both ways")
    for rows, keys in tree.blocks:
        mask = None
        if window is not None:
            mask = tree.positions_N[keys] > tree.positions_N[rows, None] - window
        seen, values = key.index_select(2, keys), value.index_select(2, keys)
        inside = scaled_dot_product_attention(
            query[:, :, rows].to(values.dtype),
            seen.to(values.dtype),
            values,
            attn_mask=mask,
            scale=scores.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out = torch.cat([out[:, :, : rows.start], inside.to(out.dtype), out[:, :, rows.stop :]], dim=2)
    return out


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Append zeros, which change no score: kernels want keys and values of one size."""
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))


ALL_ATTENTION_FUNCTIONS.register(NAME, tree_attention)


def choose_varlen(config: Any, compute_dtype: torch.dtype, device: torch.device) -> tuple[Varlen | None, str]:
    """Return the attention kernel for a model on a device, if any, and a line for the user: what is used, and why.

    The kernel is first compared with `_per_segment` on a small tree with the model's numbers of heads.
    """
    if device.type != "cuda":
        return None, ""
    if blocked := needs_of(config) & {Piece.SOFT_CAPS, Piece.SINKS}:
        return None, f"training attention: in blocks (no kernel has {' and '.join(sorted(blocked))})"
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
    for heads, kv_heads, head_dim in _head_shapes(text_config(config)):
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


def _head_shapes(config: Any) -> set[tuple[int, int, int]]:
    """Return the numbers of query and key heads, and the head size, of each kind of layer."""
    heads = config.num_attention_heads
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return {
        (
            heads,
            getattr(layer, "num_key_value_heads", None) or heads,
            getattr(config, "qk_head_dim", None) or getattr(layer, "head_dim", None) or config.hidden_size // heads,
        )
        for layer in layers
    }


def _per_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: TreeLayout, scale: float, window: int | None
) -> torch.Tensor:
    if query.is_cuda and query.shape[1] != key.shape[1]:
        # With fewer key heads, no fused GPU kernel supports a mask or fp32: the fallback would hold all scores at once.
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    grouped = query.shape[1] != key.shape[1]
    if window is not None:
        parts = tree.parts(window, query, Scores(scale=scale))
        outs = [
            scaled_dot_product_attention(
                query[:, :, part.queries],
                torch.cat([key[:, :, one] for one in part.keys], dim=2),
                torch.cat([value[:, :, one] for one in part.keys], dim=2),
                attn_mask=part.sight.mask_LS,
                scale=scale,
                enable_gqa=grouped,
            )
            for part in parts
        ]
        return torch.cat(outs, dim=2)
    lengths = [segment.stop - segment.start for segment in tree.segments]
    queries, keys, values = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    outs = []
    for number, path in enumerate(tree.paths):
        path_keys, path_values = (torch.cat([some[part] for part in path], dim=2) for some in (keys, values))
        # This kind of mask is never in memory on a GPU.
        mask = causal_lower_right(lengths[number], path_keys.shape[2])
        outs.append(
            scaled_dot_product_attention(
                queries[number], path_keys, path_values, attn_mask=mask, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(outs, dim=2)
