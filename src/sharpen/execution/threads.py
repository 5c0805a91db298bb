"""Shares the processor's cores between torch's worker threads and the threads of Python code.

In: nothing. Out: the cores of this process, and a setting of it, made before torch is loaded.
"""

import os
import sys


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def let_idle_workers_sleep() -> None:
    """Let OpenMP's workers sleep between products, unless the environment sets a policy or torch is already loaded.

    By default they spin, on cores that the user's agents, the gateway and other torch threads need. On shared cores a
    decode step then took up to 30 times as long.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
