"""Tree attention on a GPU: one call of a variable-length flash kernel for all segments of a pack.

In: queries, keys and values of a pack's computed tokens, and its tree. Out: the same as `attention._per_segment`, with
one call per layer instead of one per segment. A segment's queries are the last tokens of its path, so a causal mask
aligned at the lower right fits them; the keys of all paths are concatenated. Gradients of a shared token are added in
fp32: in bfloat16, rounding would lose those of a hundred branches.

The kernel is PyTorch's own (`torch.nn.attention.varlen`, FlashAttention; half precision only). Before it is used, its
forward and backward results are compared with `_per_segment` on this machine.

Shape suffixes: H heads, K key/value heads, N computed tokens of a pack, S keys of all paths, P segments, D head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from sharpen.learning.trainer.packing import Segment
from sharpen.learning.trainer.scores import to_device

MAX_ERROR = 0.03
"""Largest difference from plain attention, relative to the largest value: a few roundings to bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """A pack's paths in the kernel's format: offsets of each segment's queries and keys (shape P + 1, int32), the
    longest of each, and each key's index among the N tokens (None if no segment has ancestors)."""

    query_ends: torch.Tensor
    key_ends: torch.Tensor
    max_queries: int
    max_keys: int
    keys_S: torch.Tensor | None

    @classmethod
    def of(cls, segments: Sequence[Segment], paths: Sequence[Sequence[int]], device: torch.device) -> Paths:
        """Lay out the path of each segment: segment numbers from its first ancestor to itself."""
        query_lengths = np.array([segment.stop - segment.start for segment in segments])
        key_lengths = np.array([sum(int(query_lengths[part]) for part in path) for path in paths])
        keys_S = None
        if any(len(path) > 1 for path in paths):
            runs = [np.arange(segments[part].start, segments[part].stop) for path in paths for part in path]
            keys_S = to_device(np.concatenate(runs), device)
        return cls(
            query_ends=_ends(query_lengths, device),
            key_ends=_ends(key_lengths, device),
            max_queries=int(query_lengths.max()),
            max_keys=int(key_lengths.max()),
            keys_S=keys_S,
        )


def _ends(lengths: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)


class Varlen(Protocol):
    """A variable-length attention kernel with autograd support."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes that it supports."""

    def __call__(
        self,
        query_NHD: torch.Tensor,
        key_SKD: torch.Tensor,
        value_SKD: torch.Tensor,
        paths: Paths,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return the causal attention of each segment's queries, aligned at the lower right; shape (N, H, D). With
        `window`, a query sees that many keys, including its own."""


class TorchVarlen:
    """PyTorch's kernel, or a given function with the same signature."""

    dtypes = frozenset({torch.bfloat16, torch.float16})

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        if attend is None:
            from torch.nn.attention.varlen import varlen_attn

            attend = varlen_attn
        self._attend: Callable[..., Any] = attend
        # PyTorch 2.11 has no such parameter: it accepts fewer key heads as it is.
        self._has_enable_gqa = "enable_gqa" in inspect.signature(attend).parameters

    def __call__(
        self,
        query_NHD: torch.Tensor,
        key_SKD: torch.Tensor,
        value_SKD: torch.Tensor,
        paths: Paths,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See `Varlen`."""
        grouped = query_NHD.shape[1] != key_SKD.shape[1]
        out: torch.Tensor = self._attend(
            query_NHD,
            key_SKD,
            value_SKD,
            paths.query_ends,
            paths.key_ends,
            paths.max_queries,
            paths.max_keys,
            scale=scale,
            window_size=(-1, 0) if window is None else (window - 1, 0),
            **({"enable_gqa": True} if grouped and self._has_enable_gqa else {}),
        )
        return out


def varlen_attention(
    kernel: Varlen,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paths: Paths,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend with a kernel: query (1, H, N, D), key and value (1, K, N, D) give (1, H, N, D)."""
    query_NHD, key_NKD, value_NKD = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    if paths.keys_S is not None:
        key_NKD, value_NKD = (_Gather.apply(tensor, paths.keys_S) for tensor in (key_NKD, value_NKD))  # type: ignore[no-untyped-call]
    out_NHD = kernel(query_NHD, key_NKD, value_NKD, paths, scale=scale, window=window)
    return out_NHD.transpose(0, 1)[None]


class _Gather(torch.autograd.Function):
    """Select rows by index; the gradients of a row selected several times are added in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index_S: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_S)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, index_S)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_S,) = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros((ctx.num_rows, *grad.shape[1:]), dtype=exact)
        return total.index_add_(0, index_S, grad.to(exact)).to(grad.dtype), None


Plain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]
"""Plain attention over the probe's tree: query, key, value, scale, window."""


@functools.cache
def torch_varlen() -> TorchVarlen | str:
    """Return PyTorch's kernel, or the reason why it is not available."""
    try:
        return TorchVarlen()
    except ImportError as error:
        return f"this PyTorch has no varlen_attn ({error})"


def check_kernel(
    kernel: Varlen,
    plain: Plain,
    paths: Paths,
    *,
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    device: torch.device,
) -> str:
    """Compare outputs and gradients of a kernel with plain attention on random inputs. Return what is wrong, or ""."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if torch.bfloat16 in kernel.dtypes else torch.float32
    shapes = [(1, count, num_tokens, head_dim) for count in (heads[0], heads[1], heads[1], heads[0])]
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    results: list[list[torch.Tensor]] = []
    scale = head_dim**-0.5
    try:
        for run in (
            lambda q, k, v: varlen_attention(kernel, q, k, v, paths, scale, window),
            lambda q, k, v: plain(q.float(), k.float(), v.float(), scale, window),
        ):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
            out = run(*leaves)  # type: ignore[no-untyped-call]
            grads = torch.autograd.grad(out, leaves, inputs[3].to(out.dtype))
            results.append([out.detach(), *grads])
    except (RuntimeError, TypeError, ValueError) as error:  # kernels report unsupported inputs in many ways
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for name, mine, other in zip(("output", "query", "key", "value"), *results, strict=True):
        gap = float((mine.float() - other.float()).abs().max() / other.float().abs().max())
        if not gap <= MAX_ERROR:
            return f"its {name}{'' if name == 'output' else ' gradient'} is off by {gap:.2g} of the largest value"
    return ""
