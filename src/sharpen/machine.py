"""This machine as the kernel reports it: its memory, the cores of this process, and what a process started here needs.

Imports only the standard library, so that it can be asked before torch is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path


def available_bytes() -> int:
    """Return how much memory this process can still allocate, respecting a container's limit."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return available if limit is None else min(available, max(0, limit - (used or 0)))


def total_bytes() -> int:
    """Return the total memory of the machine including swap, respecting a container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal"))
    limit = _number("/sys/fs/cgroup/memory.max")
    return total if limit is None else min(total, limit)


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


def return_freed_bytes(least: int = 0) -> None:
    """Give back to the system what this process has freed in blocks that its allocator keeps, and finds too small for
    what comes next: after a training step of a large model more than a GB. Less than `least` bytes stay: they would
    soon be asked for again, page by page. Where the allocator has no such functions (they are glibc's), nothing is
    given back."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Mallinfo2
        if library.mallinfo2().fordblks >= least:
            _return_buffers()
            library.malloc_trim(0)


def _return_buffers() -> None:
    """Give back the memory into which MKL packs the matrices of products, which it keeps for the next ones: after those
    with a large output layer 100 MB."""
    if (torch := sys.modules.get("torch")) is not None and torch.__file__ is not None:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_free_buffers()


def own_pages(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory in pages of its own. The system commits a page when it is first written, and has all of them
    again when nothing refers to the memory any more. The C library's would lie between other blocks: what lives long
    there leaves gaps that what comes next does not fit into, and a block of less than 32 MB is kept when it is
    freed."""
    return mmap.mmap(-1, max(1, num_bytes), **_PRIVATE)


FILLING_GAPS = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""With these settings glibc's allocator joins every small block that is freed with what is free beside it. As it is, it
keeps the small ones that an aligned block leaves before and behind it, between which nothing as large fits any more:
of what the layers of a model take and free again in training, a GB and more at 0.6B. It reads them when a process
starts, and never again."""


def filling_gaps(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that computes with large models: `FILLING_GAPS`, unless its variable is
    set."""
    return {"GLIBC_TUNABLES": FILLING_GAPS, **environment}


def is_filling_gaps() -> bool:
    """Whether this process' allocator fills gaps, as far as can be known: its user or `filling_gaps` has set it, or it
    is not glibc's."""
    return "GLIBC_TUNABLES" in os.environ or "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ())


def start_anew_filling_gaps() -> None:
    """Put in place of this process the same program with an allocator that fills gaps, unless it has one. Only for
    the first line of a command: nothing that the process has done remains, but its open streams."""
    if not is_filling_gaps():
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], filling_gaps(os.environ))


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def trained_on() -> str:
    """Return what of this machine decides how a trainer computes: its name, its processor or GPU, and the versions of
    what computes."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("sharpen", "torch", "transformers"))
    return f"{platform.node()}, {_gpu() or _processor()}, Python {platform.python_version()}, {packages}"


def _gpu() -> str:
    """The GPU that torch, which is loaded by then, computes on."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else ""


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


def let_idle_workers_sleep() -> None:
    """Let OpenMP's workers sleep between products, unless the environment sets a policy or torch is already loaded.

    By default they spin, on cores that the user's agents, the gateway and other torch threads need. On shared cores a
    decode step then took up to 30 times as long.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def python_path() -> str:
    """Return a PYTHONPATH with which a process that is started imports the same package as this one."""
    here = str(Path(__file__).parents[1])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


def _number(path: str) -> int | None:
    """Return the number in a file of the kernel, or None if it has none (`max`, or no such file)."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
