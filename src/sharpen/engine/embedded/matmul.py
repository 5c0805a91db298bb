"""Chooses the faster of PyTorch's two fp32 matrix products on the CPU, if it has fp32 accuracy on this machine.

In: the weight shapes of a model. Out: a `MatmulChoice`, and `float32_matmul`, which applies it around an engine step.

"medium" sends fp32 products on a CPU to oneDNN, which packs weights and keeps fp32 accuracy on some machines but rounds
to bf16 on others. It is therefore probed, and used only if its error is that of fp32, since the logprobs of engine and
trainer must agree. It is set only while the engine computes: training does not gain from it, and oneDNN keeps a kernel
for every shape that it has seen, which would cost a training process hundreds of MB.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

_MAX_FP32_ERROR = 1e-5
_REPEATS = 5
_MIN_GAIN = 1.2  # below this the default is kept: timing is noisy, and attention is slower with "medium"
_MIN_WEIGHTS = 4_000_000  # smaller models decode no faster with it, but its kernels would take most of their memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulChoice:
    """The chosen precision, and the largest relative error of "medium" in the probe."""

    precision: Literal["highest", "medium"]
    max_relative_error: float


DEFAULT = MatmulChoice(precision="highest", max_relative_error=0.0)
"""PyTorch's own setting, without a probe."""


def choose_float32_matmul(weight_shapes: Sequence[tuple[int, int]], num_rows: int = 128) -> MatmulChoice:
    """Probe both kernels on products of `num_rows` rows with the given (out, in) weights, and choose the better one.

    Takes some milliseconds (large shapes are capped). For small models, and on a machine without oneDNN, it returns
    `DEFAULT`.
    """
    shapes = sorted({(min(rows, 2048), min(columns, 2048)) for rows, columns in weight_shapes})
    if sum(rows * columns for rows, columns in weight_shapes) < _MIN_WEIGHTS or not torch._C._has_mkldnn:
        return DEFAULT
    generator = torch.Generator().manual_seed(0)
    seconds = {"highest": 0.0, "medium": 0.0}
    error = 0.0
    for rows, columns in shapes:
        x = torch.randn(num_rows, columns, generator=generator)
        weight = torch.randn(rows, columns, generator=generator)
        exact = x.double() @ weight.double().t()
        for precision in ("highest", "medium"):
            with float32_matmul(precision):
                seconds[precision] += _median_seconds(x, weight)
                product = torch.nn.functional.linear(x, weight)
            if precision == "medium":
                error = max(error, float((product.double() - exact).abs().max() / exact.abs().max()))
    better = error < _MAX_FP32_ERROR and seconds["highest"] > _MIN_GAIN * seconds["medium"]
    return MatmulChoice(precision="medium" if better else "highest", max_relative_error=error)


@functools.cache
def has_exact_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this half-precision type can return fp32 (`out_dtype`), in which GPUs accumulate anyway."""
    if device.type != "cuda" or dtype == torch.float32:
        return False
    probe = torch.zeros(1, 8, 8, device=device, dtype=dtype)
    try:
        torch.bmm(probe, probe, out_dtype=torch.float32)
        torch.mm(probe[0], probe[0], out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@contextmanager
def float32_matmul(precision: str) -> Iterator[None]:
    """Set the precision of fp32 products in a block. It is process-wide: nothing else should compute meanwhile."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.inference_mode()
def _median_seconds(x: torch.Tensor, weight: torch.Tensor) -> float:
    torch.nn.functional.linear(x, weight)  # packs, compiles
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
