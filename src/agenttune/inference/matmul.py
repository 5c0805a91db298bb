"""Choice of the fp32 matrix product on the CPU: which of PyTorch's two kernels is faster here at fp32 accuracy.

In: the weight shapes of a model. Out: a `MatmulChoice`; the process-wide float32 matmul precision is set to it.

"medium" sends fp32 products on a CPU to oneDNN, which packs weights and stays at fp32 accuracy on some machines but
rounds to bf16 on others. So it is probed, and used only if its error is that of fp32. The trainer shares the setting:
engine and trainer logprobs must agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

_MAX_FP32_ERROR = 1e-5
_REPEATS = 5
_MIN_GAIN = 1.05  # below this the default stays


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulChoice:
    """What was chosen, and the probe's figures: speed of "medium" over the default, its largest relative error."""

    precision: Literal["highest", "medium"]
    speedup: float
    max_relative_error: float


def choose_float32_matmul(weight_shapes: Sequence[tuple[int, int]], num_rows: int = 128) -> MatmulChoice:
    """Probe both kernels on products of `num_rows` rows with the given (out, in) weights and set the better one.

    Takes a few milliseconds for a small model (the largest shapes are capped). On a machine without oneDNN the
    default stays.
    """
    shapes = sorted({(min(rows, 2048), min(columns, 2048)) for rows, columns in weight_shapes})
    if not shapes or not torch._C._has_mkldnn:
        return default_float32_matmul()
    generator = torch.Generator().manual_seed(0)
    seconds = {"highest": 0.0, "medium": 0.0}
    error = 0.0
    for rows, columns in shapes:
        x = torch.randn(num_rows, columns, generator=generator)
        weight = torch.randn(rows, columns, generator=generator)
        exact = x.double() @ weight.double().t()
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            seconds[precision] += _median_seconds(x, weight)
            if precision == "medium":
                difference = (torch.nn.functional.linear(x, weight).double() - exact).abs().max()
                error = max(error, float(difference / exact.abs().max()))
    speedup = seconds["highest"] / seconds["medium"]
    better = error < _MAX_FP32_ERROR and speedup > _MIN_GAIN
    return _apply(MatmulChoice(precision="medium" if better else "highest", speedup=speedup, max_relative_error=error))


def default_float32_matmul() -> MatmulChoice:
    """Set PyTorch's default without a probe (whose timing could come out either way)."""
    return _apply(MatmulChoice(precision="highest", speedup=1.0, max_relative_error=0.0))


def _apply(choice: MatmulChoice) -> MatmulChoice:
    torch.set_float32_matmul_precision(choice.precision)
    return choice


@torch.inference_mode()
def _median_seconds(x: torch.Tensor, weight: torch.Tensor) -> float:
    torch.nn.functional.linear(x, weight)  # packs, compiles
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
