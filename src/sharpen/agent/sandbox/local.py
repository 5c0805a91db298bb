"""Runs commands as processes of this machine, each under a keeper.

In: a `Command`. Out: `Ended`. `keep` is shared with containers, whose command line is kept in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sharpen.agent.sandbox.command import Command, Ended, Lifeline, Limits
from sharpen.agent.sandbox.keeper import Order, Report, processes
from sharpen.errors import CommandError, SandboxError

# The kept part of a command's output: its head and its tail.
#
# In: bytes as they come. Out: text, with a line where bytes were left out.


class Output:
    """Keeps the first and the last `limit / 2` bytes."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Add the next bytes."""
        self._num_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._half:  # cut seldom: each cut copies what is kept
            del self._tail[: -self._half]

    def text(self) -> str:
        """Return what was kept; bytes that are not UTF-8 are replaced."""
        tail = self._tail[-self._half :]
        left_out = self._num_bytes - len(self._head) - len(tail)
        mark = f"\n[... {left_out:,} bytes of output left out ...]\n" if left_out else ""
        return self._head.decode(errors="replace") + mark + tail.decode(errors="replace")


# Bounds the memory and the number of processes of running commands.
#
# In: the process of each command's keeper, and its limits. Out: the end of its lifeline when it is over one. One thread
# looks for all commands of this process, since each look reads the table of all processes.

LOOK_EVERY_S = 0.2
SHARE = 0.05
"""At most this share of one core goes into looking: with many processes the looks become fewer."""

_lock = threading.Lock()
_watched: dict[int, tuple[Limits, Lifeline]] = {}
"""By the keeper's process."""
_running = False


@contextlib.contextmanager
def watched(keeper: int, limits: Limits, lifeline: Lifeline, *, active: bool) -> Iterator[None]:
    """Watch the processes below a keeper, if there is a limit to watch."""
    if not active or (limits.memory_mb is None and limits.max_processes is None):
        yield
        return
    with _lock:
        _watched[keeper] = (limits, lifeline)
        _start()
    try:
        yield
    finally:
        with _lock:
            _watched.pop(keeper, None)


def _start() -> None:
    """Start the thread if it does not run. With the lock."""
    global _running
    if not _running:
        _running = True
        threading.Thread(target=_watch, name="sharpen-watch-commands", daemon=True).start()


def _watch() -> None:
    """Look until there is nothing to watch."""
    global _running
    while True:
        with _lock:
            if not _watched:
                _running = False
                return
            looked_at = dict(_watched)
        began = time.perf_counter()
        usage = usage_below(set(looked_at))
        for keeper, (limits, lifeline) in looked_at.items():
            num_processes, num_bytes = usage[keeper]
            if limits.max_processes is not None and num_processes > limits.max_processes:
                lifeline.end("processes")
            elif limits.memory_mb is not None and num_bytes > limits.memory_mb * 2**20:
                lifeline.end("memory")
        time.sleep(max(LOOK_EVERY_S, (time.perf_counter() - began) / SHARE))


def usage_below(keepers: set[int]) -> dict[int, tuple[int, int]]:
    """Return for each keeper how many processes there are below it, and their resident bytes."""
    rows = processes()
    parents = {process.id: process.parent for process in rows}
    usage = dict.fromkeys(keepers, (0, 0))
    for process in rows:
        parent, seen = process.parent, {process.id}
        while parent not in keepers and parent in parents and parent not in seen:
            seen.add(parent)
            parent = parents[parent]
        if parent in keepers:
            number, total = usage[parent]
            usage[parent] = (number + 1, total + process.num_bytes)
    return usage


log = logging.getLogger("sharpen.sandbox")

KEEPER = Path(__file__).with_name("keeper.py")
LEFT_OVER_S = 1.0
"""How long output is read after the keeper has ended: a process that could not be killed may hold it open."""
MAX_OPEN_FILES = 65_536
REASONS = {
    errno.ENOENT: "is not found: give its whole path, or a name in PATH",
    errno.EACCES: "may not be run: it has no permission to, or is a folder",
    errno.ENOEXEC: "cannot be run: a script needs a first line like #!/bin/sh",
    errno.E2BIG: "has too long arguments or variables: put long texts into files",
}


@dataclass(frozen=True, slots=True)
class Subprocess:
    """Processes of this machine and this user.

    `own_processes`: they see and can signal no processes but their own (a PID namespace of Linux), so that an agent's
    `pkill python` does not end the training; None: where the system allows it. They see the files and the network of
    this machine: this keeps agents apart from each other and from the owner's environment, and ends them, but does
    not hold back one that means harm.
    """

    own_processes: bool | None = None

    def gateway_host(self) -> None:
        """They reach the gateway at its own address."""

    def run(self, command: Command, lifeline: Lifeline) -> Ended:
        """See `Sandbox.run`."""
        limits = command.limits
        environment = {"PATH": path_here(), **command.environment}
        order: Order = {
            "arguments": list(command.arguments),
            "environment": environment,
            "folder": str(command.work),
            "time_s": limits.time_s,
            "memory_bytes": None if limits.memory_mb is None else int(limits.memory_mb * 2**20),
            "afterwards": [],
            "remove": str(command.root),
            "trainer": -1,
            "open_files": open_files(),
        }
        apart: Sequence[str] = ()
        if self.own_processes is not False:
            apart, problem = namespace()
            if self.own_processes and not apart:
                raise SandboxError(
                    f"own_processes=True: this system gives a command no processes of its own: {problem}"
                )
        return keep(order, command.limits, lifeline, prefix=apart)


def path_here() -> str:
    """Return the PATH of this process."""
    return os.environ.get("PATH", os.defpath)


@functools.cache
def namespace() -> tuple[tuple[str, ...], str]:
    """Return the command line that starts a process in a PID namespace; none, and the reason, where there are none."""
    user = () if os.geteuid() == 0 else ("--user", "--map-current-user")
    prefix = ("unshare", *user, "--pid", "--fork", "--mount-proc", "--kill-child", "--")
    try:
        tried = subprocess.run([*prefix, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        problem = tried.stderr.strip() if tried.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if not problem:
        return prefix, ""
    log.warning(
        "commands of rollouts see the other processes of this machine, and can end those of this user, the training "
        "included: there is no PID namespace for them (%s)",
        problem,
    )
    return (), problem


def keep(
    order: Order,
    limits: Limits,
    lifeline: Lifeline,
    *,
    prefix: Sequence[str],
    watch: bool = True,
    files: Sequence[int] = (),
    outputs: tuple[Output, Output] | None = None,
) -> Ended:
    """Run an order under a keeper, to its end. `prefix` is the command line that starts the keeper apart. `watch`:
    memory and number of its processes are bounded from here. It inherits the open `files`. `outputs` take what it
    writes, by default the bytes that `limits` says.

    Raises `CommandError` if it cannot be started, `SandboxError` if the keeper was killed.
    """
    kept, line = os.pipe()
    death = _death_of(os.getpid())
    with tempfile.TemporaryFile("w+", encoding="utf-8") as papers, _Line(line) as end:
        json.dump({**order, "trainer": death}, papers)
        papers.flush()
        papers.seek(0)
        try:
            keeper = subprocess.Popen(
                [*prefix, sys.executable, "-I", "-S", str(KEEPER), str(papers.fileno())],
                stdin=kept,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": path_here()},
                pass_fds=[*files, *(file for file in (papers.fileno(), death) if file >= 0)],
                start_new_session=True,
            )
        finally:
            os.close(kept)
        lifeline.on_end(end)
        with watched(keeper.pid, limits, lifeline, active=watch):
            stdout, stderr = _read(keeper, outputs or (Output(limits.output_bytes), Output(limits.output_bytes)))
            keeper.wait()
        papers.seek(0)
        return _ended(papers, order, stdout, stderr, keeper.returncode)


@functools.cache
def files_at_first() -> int:
    """Return how many files this process could have open before Sharpen raised that. Whatever raises it asks first."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@functools.cache
def open_files() -> int:
    """Let this process have as many files open as it may: each running command needs five. Return how many it could
    have at first, which is what commands get."""
    at_first = files_at_first()
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(most, MAX_OPEN_FILES)
    if now != resource.RLIM_INFINITY and now < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
    return at_first


@functools.cache
def _death_of(process: int) -> int:
    """Open, once, a file that can be read from when a process has died; -1 where there is no such thing."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return -1


class _Line:
    """The trainer's end of the lifeline. Called with a reason, it sends the reason to the keeper."""

    def __init__(self, file: int) -> None:
        self._file: int | None = file
        self._lock = threading.Lock()

    def __call__(self, reason: str) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):  # the keeper has ended
            if self._file is not None:
                os.write(self._file, f"{reason}\n".encode()[:200])

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None


def _read(keeper: subprocess.Popen[bytes], kept: tuple[Output, Output]) -> tuple[str, str]:
    """Read both outputs until they are closed."""
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    outputs = dict(zip((keeper.stdout, keeper.stderr), kept, strict=True))
    with selectors.DefaultSelector() as ready:
        for file in outputs:
            ready.register(file, selectors.EVENT_READ)
        while ready.get_map():
            found = ready.select(LEFT_OVER_S)
            for key, _ in found:
                data = os.read(key.fd, 1 << 16)
                if data:
                    outputs[key.fileobj].add(data)  # type: ignore[index]
                else:
                    ready.unregister(key.fileobj)
            if not found and keeper.poll() is not None:
                break
    for file in outputs:
        file.close()
    stdout, stderr = (output.text() for output in outputs.values())
    return stdout, stderr


def _ended(papers: IO[str], order: Order, stdout: str, stderr: str, keeper_status: int) -> Ended:
    """Read the keeper's report. Raises `SandboxError` if there is none, `CommandError` if it did not start."""
    name = order["arguments"][0]
    try:
        report: Report = json.load(papers)
        error, status = report.get("error"), report.get("status")
    except ValueError:
        error = status = None
    if error:
        reason = REASONS.get(error, f"could not be started: {os.strerror(error)}")
        raise CommandError(f"the command {name!r} {reason} (in {order['folder']})")
    if status is None:
        raise SandboxError(
            f"the keeper of the command {name!r} ended with status {keeper_status} and no report "
            f"(was it killed?): {stderr[-500:]}"
        )
    if survivors := report["survivors"]:
        log.warning("%d processes of the command %r could not be killed: %s", len(survivors), name, survivors)
    return Ended(exit_code=status, stdout=stdout, stderr=stderr, seconds=report["seconds"], ended_by=report["ended_by"])
