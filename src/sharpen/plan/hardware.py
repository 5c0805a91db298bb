"""What a run is planned for: a GPU by name, by its memory, or this machine.

In: options of the command line, or the machine itself. Out: `Hardware`. Peak rates are those of the vendors' data
sheets (dense, without sparsity); of this machine's processor they are measured, briefly.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from sharpen.errors import ConfigError
from sharpen.trainer.host_memory import available_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Devices of one kind. `memory_bytes` is what one has (of a CPU: what is free now). Rates are per second:
    operations in bfloat16 and float32, bytes read; None where they are not known."""

    name: str
    kind: Literal["cuda", "cpu"]
    count: int
    memory_bytes: int
    bfloat16_flops: float | None = None
    float32_flops: float | None = None
    bandwidth: float | None = None
    measured: bool = False


def _gpu(name: str, gib: float, bfloat16: float, float32: float, gb_per_s: float) -> Hardware:
    return Hardware(
        name=name,
        kind="cuda",
        count=1,
        memory_bytes=int(gib * GIB),
        bfloat16_flops=bfloat16 * 1e12,
        float32_flops=float32 * 1e12,
        bandwidth=gb_per_s * 1e9,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A10", 22.0, 125.0, 31.2, 600),
        _gpu("A100-40GB", 39.4, 312.0, 19.5, 1555),
        _gpu("A100-80GB", 79.1, 312.0, 19.5, 2039),
        _gpu("B200", 178.0, 2250.0, 75.0, 8000),
        _gpu("H100", 79.1, 989.0, 67.0, 3350),
        _gpu("H100-PCIe", 79.1, 756.0, 51.0, 2000),
        _gpu("H200", 139.8, 989.0, 67.0, 4800),
        _gpu("L4", 22.0, 121.0, 30.3, 300),
        _gpu("L40S", 44.4, 362.0, 91.6, 864),
        _gpu("RTX-3090", 23.6, 71.0, 35.6, 936),
        _gpu("RTX-4090", 23.5, 165.0, 82.6, 1008),
        _gpu("RTX-5090", 31.3, 209.0, 104.8, 1792),
        _gpu("RTX-A6000", 47.4, 155.0, 38.7, 768),
    )
}
"""By name: memory in GiB as PyTorch reports it, TFLOP/s in bfloat16 and float32, GB/s."""

_UNITS = {"": 2**30, "g": 2**30, "gb": 2**30, "gib": 2**30, "m": 2**20, "mb": 2**20, "mib": 2**20, "t": 2**40}
_UNITS |= {"tb": 2**40, "tib": 2**40}


def parse_memory(text: str) -> int:
    """Bytes of `80GB`, `24 GiB`, `512MB`, `80` (GiB); a GPU's GB are GiB. Raises `ConfigError`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS or float(found[1]) <= 0:
        raise ConfigError(f"a size of memory is a number with MB, GB or TB, such as 80GB, but {text!r} came")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def gpu_by_name(name: str) -> Hardware:
    """The GPU of the table; case, blanks and dashes do not matter. Raises `ConfigError` with the list."""
    plain = {re.sub(r"[\s_-]", "", known).lower(): gpu for known, gpu in GPUS.items()}
    gpu = plain.get(re.sub(r"[\s_-]|nvidia", "", name.lower()))
    if gpu is None:
        raise ConfigError(f"no GPU is known by the name {name!r}: {', '.join(GPUS)}, or give --gpu-memory alone")
    return gpu


def chosen_hardware(name: str | None, count: int | None, memory: str | None) -> Hardware | None:
    """What the options say; None where they say nothing, which means this machine. Raises `ConfigError`."""
    if count is not None and count < 1:
        raise ConfigError(f"--gpus must be at least 1, but {count} came; leave it out to plan for this machine")
    if name is None and memory is None:
        if count is None:
            return None
        here = this_machine()
        if here.kind != "cuda":
            raise ConfigError("--gpus needs --gpu or --gpu-memory: no GPU is here to take them from")
        return replace(here, count=count)
    gpu = Hardware(name="GPU", kind="cuda", count=1, memory_bytes=1) if name is None else gpu_by_name(name)
    found = gpu.memory_bytes if memory is None else parse_memory(memory)
    return replace(gpu, count=count or 1, memory_bytes=found)


def this_machine(device: str = "auto") -> Hardware:
    """The GPUs that are here, else the processor and the memory that is free; without rates."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known = next((gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in properties.name.split()), None)
        base = known or Hardware(name=properties.name, kind="cuda", count=1, memory_bytes=1)
        count = 1 if device.startswith("cuda:") else torch.cuda.device_count()
        return replace(base, name=properties.name, count=count, memory_bytes=int(properties.total_memory))
    return Hardware(name="this machine's CPU", kind="cpu", count=1, memory_bytes=available_bytes())


def measured_rates(hardware: Hardware, seconds: float = 0.3) -> Hardware:
    """The same with rates measured here: a matrix product in both types, a sum over memory; each for so long, the best
    time counts, since whatever else the machine does only adds to it."""
    import torch

    device = torch.device(hardware.kind)

    def product(dtype: torch.dtype) -> float:
        size = 1024 if hardware.kind == "cpu" else 8192
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        return 2 * size**3 / _best_seconds(lambda: left @ right, seconds)

    block = torch.ones(2**24 if hardware.kind == "cpu" else 2**28, dtype=torch.float32, device=device)
    return replace(
        hardware,
        bfloat16_flops=product(torch.bfloat16),
        float32_flops=product(torch.float32),
        bandwidth=block.nbytes / _best_seconds(block.sum, seconds),
        measured=True,
    )


def _best_seconds(work: Callable[[], object], seconds: float) -> float:
    """The shortest time that `work` took, done again and again for so long, after doing it once."""
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    best, until = float("inf"), time.perf_counter() + seconds
    work()
    wait()
    while best == float("inf") or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - began)
    return best
