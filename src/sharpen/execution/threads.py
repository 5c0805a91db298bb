"""How the processor's cores are shared between torch's worker threads and the threads of Python code.

In: nothing. Out: a process setting, made before torch is loaded.
"""

import os
import sys


def let_idle_workers_sleep() -> None:
    """Let OpenMP's workers sleep between products, unless the environment says otherwise or torch is loaded already.

    By default they spin, on a core that the user's agents, the gateway and the other torch threads need: with the cores
    shared, a decode step then took up to 30 times as long.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
