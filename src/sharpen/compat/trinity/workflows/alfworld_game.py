"""A game of ALFWorld, in a process of its own.

In: the path of a game's file, and actions. Out: what is seen, rewards. The package allows one game at a time in a
process: its parser and its translator of PDDL keep their state in globals and replace `sys.argv` and `sys.stdout`. A
process is kept for later games, so that there are as many as games at once.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from typing import Any

_idle: list[subprocess.Popen[bytes]] = []
_all: list[subprocess.Popen[bytes]] = []
_lock = threading.Lock()


class AlfworldGame:
    """A game that has begun. `observation` is what was seen last. Raises `RuntimeError` where the package fails."""

    def __init__(self, file: str) -> None:
        with _lock:
            self._process = _idle.pop() if _idle else _start()
        self.observation = ""
        self._ask({"open": os.path.abspath(file)})

    def act(self, action: str) -> tuple[float, bool]:
        """Do an action; the reward so far, and whether the game is over."""
        reply = self._ask({"act": action})
        return float(reply["reward"]), bool(reply["done"])

    def close(self) -> None:
        """Keep the process for a later game."""
        with _lock:
            if self._process.poll() is None:
                _idle.append(self._process)

    def _ask(self, question: dict[str, str]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        reply: dict[str, Any] = json.loads(line) if line else {"error": "its process ended: see its message"}
        if "error" in reply:
            _end(process)
            raise RuntimeError(f"the game of ALFWorld failed: {reply['error']}")
        self.observation = str(reply["observation"])
        return reply


def _start() -> subprocess.Popen[bytes]:
    """A process that imports from where this one does."""
    command = [sys.executable, "-m", "sharpen.compat.trinity.workflows.alfworld_process"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    _all.append(process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
    with _lock:
        _all.remove(process)


@atexit.register
def end_all() -> None:
    """End all processes, those of games that go on too."""
    _idle.clear()
    for process in list(_all):
        _end(process)
