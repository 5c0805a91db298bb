"""The process that keeps one command: starts it, watches it, and ends every process that came from it.

    trainer ──lifeline──► keeper ──► command ──► its children, whatever they do to get away

It runs as a script of its own (`python keeper.py FD`, standard library only). In: a JSON order in the open file FD, see
`Order`; the lifeline on standard input. Out: a JSON report in the same file; the command writes to the keeper's own
standard output and error. The command ends when it is over, at its time limit, or as soon as the lifeline has a line
(the reason) or is closed, which also happens when the trainer dies, however it dies.

On Linux the keeper is a subreaper, or the first process of a namespace: processes whose parents have ended become its
children, also after `setsid` and two forks. On other systems only processes that still have their parents are found.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple, TypedDict

LIFELINE = 0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_EVERY_S = 0.5
"""How often it looks whether its parent still lives, where no file tells it of the trainer's death."""
KILL_S = 10.0
"""How long it tries to end processes. Some cannot be killed: those of another user, those that wait for a dead disk."""
AFTERWARDS_S = 60.0
TRAINER_GONE = "the end of the trainer"
"""Why a command ends whose lifeline has no last line."""


class Order(TypedDict):
    """What to run: arguments, environment, folder, limits (None is no limit). `memory_bytes` bounds the data of each
    process. `afterwards` is a further command, run if this one did not end by itself (removes a container).
    `remove` is a folder to be removed if the trainer is gone (empty: none). `trainer` is an open file that can be read
    from when the trainer has died (a pidfd), in case another process holds the lifeline open; -1 if there is none.
    `open_files` is how many files the command may have open."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    time_s: float | None
    memory_bytes: int | None
    afterwards: list[str]
    remove: str
    trainer: int
    open_files: int


class Report(TypedDict, total=False):
    """How it ended. `status` is the exit code, or minus the signal; `error` is the number of the error that kept the
    command from being started; `ended_by` is empty if it ended by itself; `survivors` could not be killed."""

    status: int
    error: int
    ended_by: str
    seconds: float
    survivors: list[int]


def main() -> None:
    """Keep one command."""
    with open(int(sys.argv[1]), "r+", encoding="utf-8") as papers:
        order: Order = json.load(papers)
        for file in (papers.fileno(), order["trainer"]):
            if file >= 0:
                os.set_inheritable(file, False)
        report = keep(order)
        papers.seek(0)
        papers.truncate()
        json.dump(report, papers)


def keep(order: Order) -> Report:
    """Run the command to its end, and end what is left of it."""
    parent, trainer = os.getppid(), order["trainer"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    watched = select.poll()  # not select.select: the numbers of inherited files may be above 1,024
    for file in (LIFELINE, trainer, wake):
        if file >= 0:
            watched.register(file, select.POLLIN)
    began = time.monotonic()
    command, error = start(order)
    if error:
        return {"error": error}
    status: int | None = None
    ended_by = ""
    while status is None and not ended_by:
        left = LOOK_EVERY_S if order["time_s"] is None else began + order["time_s"] - time.monotonic()
        ready = {file for file, _ in watched.poll(1000 * max(0.0, min(left, LOOK_EVERY_S)))}
        if wake in ready:
            os.read(wake, 4096)
        status = _reap()[0].get(command)
        if LIFELINE in ready:
            ended_by = os.read(LIFELINE, 200).decode(errors="replace").strip() or TRAINER_GONE
        elif trainer in ready or os.getppid() != parent:
            ended_by = TRAINER_GONE
        elif left <= 0 and status is None:
            ended_by = "time"
    seconds = time.monotonic() - began
    ends, survivors = end_all()
    if ended_by:
        _run_afterwards(order)
    if ended_by == TRAINER_GONE and order["remove"]:
        shutil.rmtree(order["remove"], ignore_errors=True)
    status = ends.get(command, 0) if status is None else status
    return {"status": status, "ended_by": ended_by, "seconds": seconds, "survivors": survivors}


def start(order: Order) -> tuple[int, int]:
    """Start the command; return its process id, and the number of the error that prevented it (0 if none)."""
    keeper = os.getpid()
    error, tell = os.pipe()
    command = os.fork()
    if command == 0:
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)
            _become(order)
        except OSError as failure:
            os.write(tell, str(failure.errno).encode())
        finally:
            os._exit(127)
    os.close(tell)
    with open(error, "rb") as told:
        number = int(told.read() or 0)
    if number:
        os.waitpid(command, 0)
    return command, number


def _become(order: Order) -> None:
    """Turn this process into the command. Raises `OSError`."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), LIFELINE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (order["open_files"], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if order["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (order["memory_bytes"], order["memory_bytes"]))
    os.chdir(order["folder"])
    os.execvpe(order["arguments"][0], order["arguments"], order["environment"])


class Process(NamedTuple):
    """A process, its parent and group, and its resident memory."""

    id: int
    parent: int
    group: int
    num_bytes: int


def end_all() -> tuple[dict[int, int], list[int]]:
    """Kill everything that came from this process; return how its children ended, and whom nothing kills.

    Whole groups are killed, those of children that have just ended too: where each member forks and exits at once, a
    list of processes never holds one that still lives. All is over when there is no child left, as the system says: a
    list may lack what was forked while it was read.
    """
    ends: dict[int, int] = {}
    until = time.monotonic() + KILL_S
    while True:
        left = descendants(os.getpid())
        groups = {process.group for process in left}
        ended, some_left = _reap(groups)
        ends |= ended
        if not (some_left or left):
            return ends, []
        if time.monotonic() > until:
            return ends, sorted(process.id for process in left)
        for group in groups:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(0.001)


def descendants(ancestor: int) -> list[Process]:
    """Return the processes that came from one, without those that have ended."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = children.get(ancestor, [])
    while waiting:
        found.append(waiting.pop())
        waiting.extend(children.pop(found[-1].id, ()))
    return found


def processes() -> list[Process]:
    """Return all processes that this user sees and that have not ended."""
    if not os.path.exists("/proc/self/stat"):
        shown = ["ps", "-A", "-o", "pid=,ppid=,pgid=,rss=,stat="]
        rows = map(str.split, subprocess.run(shown, capture_output=True, text=True).stdout.splitlines())
        return [Process(int(a), int(b), int(c), int(kb) << 10) for a, b, c, kb, state in rows if state[0] != "Z"]
    page = resource.getpagesize()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, *numbers = file.read().rpartition(b")")[2].split()  # the name before may hold anything
        except OSError:  # it has just ended
            continue
        if state not in (b"Z", b"X"):
            found.append(Process(int(name), int(numbers[0]), int(numbers[1]), int(numbers[20]) * page))
    return found


def _reap(groups: set[int] | None = None) -> tuple[dict[int, int], bool]:
    """Return how children ended that have ended (the exit code, or minus the signal), and whether there are others.
    Their process groups are added to `groups`."""
    ends: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            process = -1
            if groups is not None and hasattr(os, "waitid"):  # macOS has none before Python 3.13
                waiting = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if waiting is not None:
                    process = waiting.si_pid
                    groups.add(os.getpgid(process))
            process, status = os.waitpid(process, os.WNOHANG)
            if process == 0:
                return ends, True
            ends[process] = os.waitstatus_to_exitcode(status)
    return ends, False


def _run_afterwards(order: Order) -> None:
    if order["afterwards"]:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(
                order["afterwards"],
                env=order["environment"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=AFTERWARDS_S,
            )


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno() or errno.EINVAL, "prctl")


if __name__ == "__main__":
    main()
