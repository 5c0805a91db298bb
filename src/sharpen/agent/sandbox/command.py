"""The records and interfaces of a command: what is to be run, where it runs, how it ended.

In: nothing. Out: `Command`, `Ended`, `Lifeline`; `Sandbox` and `Session`, the interfaces of the places where commands
run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of a command; None is no bound.

    `memory_mb` bounds the data of each of its processes, and the resident memory of all of them together;
    `max_processes` their number. `output_bytes` of standard output, and of standard error, are kept.
    """

    time_s: float | None = None
    memory_mb: float | None = None
    max_processes: int | None = None
    output_bytes: int = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to run.

    `root` is a folder of its own with two folders: `work`, in which it starts, and `home`, its HOME. `environment` is
    what it finds, in addition to the PATH of the sandbox.
    """

    arguments: tuple[str, ...]
    root: Path
    environment: Mapping[str, str]
    limits: Limits

    @property
    def work(self) -> Path:
        """The folder in which the command starts."""
        return self.root / "work"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended: its exit code (minus the signal that killed it), its output, its duration.

    `ended_by` is empty if it ended by itself; else the reason: `time`, `memory`, `processes`, or a sentence.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    ended_by: str


class Lifeline:
    """Ends a running command, from any thread. What runs commands says how by `on_end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._actions: list[Callable[[str], None]] = []

    def on_end(self, action: Callable[[str], None]) -> None:
        """Have `action(reason)` called when the command is to end; at once if that is so already."""
        with self._lock:
            if self._reason is None:
                self._actions.append(action)
                return
        action(self._reason)

    @property
    def is_held(self) -> bool:
        """Whether something runs that it ends."""
        return bool(self._actions)

    def end(self, reason: str) -> None:
        """End the command. Only the first reason counts."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        for action in self._actions:
            action(reason)


class Sandbox(Protocol):
    """A place where commands run. `Subprocess` and `Container` are two; a third has these two methods."""

    def gateway_host(self) -> str | None:
        """Return the name by which a command there reaches the gateway; None if it is at the gateway's own address."""

    def run(self, command: Command, lifeline: Lifeline) -> Ended:
        """Run a command to its end, and let nothing of it live on. Blocks its thread. Raises `CommandError`
        if it cannot be started, `SandboxError` if that is not its own fault.

        When `lifeline` ends, the command must end within a moment, and this method return.
        """


class Session(Sandbox, Protocol):
    """A sandbox that stays: what a command leaves in its files is there for the next one.

    Commands start in its own folder, with its own HOME. Paths in it are whole ones, with `/` for its root.
    """

    def as_user(self, user: str | None) -> Sandbox:
        """Return what runs commands in it as another user, by name or number; None: its own."""

    def put(self, source: Path, target: str) -> None:
        """Copy a file or a folder into it, in place of what is there. Blocks. Raises `SandboxError`."""

    def get(self, source: str, target: Path) -> bool:
        """Copy a file or a folder out of it, to a path that is not there yet; False if there is none. Blocks."""

    def close(self) -> None:
        """End what runs in it, and remove it. Closing again does nothing. Blocks."""
