"""Chooses the faster of two ways to a matrix product on the CPU.

In: the weights of a model, or their shapes. Out for bf16: whether a product is faster as W X^T than as X W^T, since the
kernel reorders its second factor at each call, which is then the smaller one. Out for fp32: a `MatmulChoice`, and
`float32_matmul`, which applies it around an engine step.

"medium" sends fp32 products on a CPU to oneDNN, which packs weights and keeps fp32 accuracy on some machines but rounds
to bf16 on others. It is therefore probed, and used only if its error is that of fp32, since the logprobs of engine and
trainer must agree. It is set only while the engine computes: training does not gain from it, and oneDNN keeps a kernel
for every shape that it has seen, which would cost a training process hundreds of MB.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

_MAX_FP32_ERROR = 1e-5
_REPEATS = 5
_MIN_GAIN = 1.2  # below this the default is kept: timing is noisy, and attention is slower with "medium"
_MIN_COLUMN_WEIGHT = 1_000_000  # smaller weights stay in the cache
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
                seconds[precision] += _median_seconds(functools.partial(torch.nn.functional.linear, x, weight))[0]
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


COLUMN_ROWS = range(32, 129, 16)
"""Numbers of rows with which a product may be computed as W X^T: the kernel's vectors are full, and the weight is much
larger than the rows."""


def are_columns_faster(weight_OC: torch.Tensor) -> bool:
    """Measure whether products of this weight with a few rows are faster as W X^T, in some milliseconds. Only bf16 on a
    CPU is asked: other products stay as they are."""
    if weight_OC.device.type != "cpu" or weight_OC.dtype != torch.bfloat16 or weight_OC.numel() < _MIN_COLUMN_WEIGHT:
        return False
    x_NC = torch.ones(COLUMN_ROWS.start, weight_OC.shape[1], dtype=weight_OC.dtype)
    as_rows, as_columns = _median_seconds(lambda: x_NC @ weight_OC.t(), lambda: weight_OC @ x_NC.t())
    return as_columns < as_rows


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
def _median_seconds(*products: Callable[[], torch.Tensor]) -> list[float]:
    """Time products, which take turns."""
    for product in products:  # packs, compiles
        product()
    times: list[list[float]] = [[] for _ in products]
    for _ in range(_REPEATS):
        for product, seconds in zip(products, times, strict=True):
            start = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]
