"""The hardware that a run is planned for: a GPU by name, a GPU by its memory, or this machine.

In: options of the command line, or the machine itself. Out: `Hardware`; how much faster the processor is in bfloat16.
"""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass, replace
from typing import Literal

from sharpen.errors import ConfigError
from sharpen.machine import available_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Devices of one kind. `memory_bytes` is the memory of one device (for a CPU: the memory that is free now)."""

    name: str
    kind: Literal["cuda", "cpu"]
    count: int
    memory_bytes: int


GPUS = {
    "A10": 22.0,
    "A100-40GB": 39.4,
    "A100-80GB": 79.1,
    "B200": 178.0,
    "H100": 79.1,
    "H100-PCIe": 79.1,
    "H200": 139.8,
    "L4": 22.0,
    "L40S": 44.4,
    "RTX-3090": 23.6,
    "RTX-4090": 23.5,
    "RTX-5090": 31.3,
    "RTX-A6000": 47.4,
}
"""Memory of GPUs in GiB, as PyTorch reports it."""

_UNITS = {"": 2**30, "g": 2**30, "gb": 2**30, "gib": 2**30, "m": 2**20, "mb": 2**20, "mib": 2**20, "t": 2**40}
_UNITS |= {"tb": 2**40, "tib": 2**40}


def parse_memory(text: str) -> int:
    """Convert `80GB`, `24 GiB`, `512MB` or `80` (GiB) to bytes; a GPU's GB are GiB. Raises `ConfigError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"a memory size must be a number with MB, GB or TB, such as 80GB; got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def gpu_by_name(name: str) -> Hardware:
    """Return the GPU with this name; case, blanks and dashes do not matter. Raises `ConfigError` with the known
    names."""
    plain = {re.sub(r"[\s_-]", "", known).lower(): known for known in GPUS}
    known = plain.get(re.sub(r"[\s_-]|nvidia", "", name.lower()))
    if known is None:
        raise ConfigError(f"unknown GPU {name!r}: use one of {', '.join(GPUS)}, or --gpu-memory alone")
    return Hardware(name=known, kind="cuda", count=1, memory_bytes=int(GPUS[known] * GIB))


def chosen_hardware(name: str | None, count: int | None, memory: str | None) -> Hardware | None:
    """Return the hardware that the options describe, None for this machine (no option given). Raises `ConfigError`."""
    if count is not None and count < 1:
        raise ConfigError(f"--gpus must be at least 1, got {count}; leave it out to plan for this machine")
    if name is None and memory is None:
        if count is None:
            return None
        here = this_machine()
        if here.kind != "cuda":
            raise ConfigError("--gpus needs --gpu or --gpu-memory, because this machine has no GPU")
        return replace(here, count=count)
    gpu = Hardware(name="GPU", kind="cuda", count=1, memory_bytes=1) if name is None else gpu_by_name(name)
    memory_bytes = gpu.memory_bytes if memory is None else parse_memory(memory)
    return replace(gpu, count=count or 1, memory_bytes=memory_bytes)


def this_machine(device: str = "auto") -> Hardware:
    """Return this machine's GPUs, else its processor and the memory that is free."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        count = 1 if device.startswith("cuda:") else torch.cuda.device_count()
        return Hardware(name=properties.name, kind="cuda", count=count, memory_bytes=int(properties.total_memory))
    return Hardware(name="this machine's CPU", kind="cpu", count=1, memory_bytes=available_bytes())


_ROWS, _WIDEST, _MEASURED_S = 128, 4096, 0.1
"""Rows of a measured product, its greatest width, and the time for each type."""


@functools.cache
def bfloat16_speedup(outputs: int, inputs: int) -> float:
    """Return how many times as fast as in float32 this processor multiplies by a layer of this shape in bfloat16. It is
    measured once, in some 0.2 s: the fastest of each type's products, which take turns."""
    import torch

    shape = min(outputs, _WIDEST), min(inputs, _WIDEST)
    layers = [torch.full(shape, 0.01, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    rows = [torch.ones(_ROWS, shape[1], dtype=layer.dtype) for layer in layers]
    fastest, until, turns = [float("inf")] * 2, time.perf_counter() + 2 * _MEASURED_S, 0
    with torch.inference_mode():
        while turns < 3 or time.perf_counter() < until:
            for place, (row, layer) in enumerate(zip(rows, layers, strict=True)):
                begun = time.perf_counter()
                torch.nn.functional.linear(row, layer)
                fastest[place] = min(fastest[place], time.perf_counter() - begun)
            turns += 1
    return fastest[0] / fastest[1]
