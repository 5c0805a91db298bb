"""Who holds a run's directory: one process at a time.

In: the directory. Out: a lock of the operating system on `run.lock` in it, which says who has it. The kernel gives it
back when that process ends, however it ends. Looking at a run (certify, show, diagnose) needs no lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from sharpen.errors import ConfigError

NAME = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: set[int] = set()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[str]:
    """Hold the run in `directory`; yields a line to print where the file system has no locks, else an empty one.

    Raises `ConfigError`, which says who holds it, if another run does, be it of this process.
    """
    descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    _held.add(descriptor)
    try:
        is_kept = _take(descriptor, directory)
        _write(descriptor, {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()})
        try:
            yield "" if is_kept else f"{directory} has no file locks: see to it that no other run has this name"
        finally:
            if descriptor in _held:  # not in a forked child
                _write(descriptor, {})
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)


def _write(descriptor: int, holder: Mapping[str, int | str]) -> None:
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, f"{json.dumps(holder)}\n".encode())


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


def _take(descriptor: int, directory: Path) -> bool:
    """Lock the file; false where that is not possible. Raises `ConfigError` if somebody has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"the run {directory.name!r} is in use: {_holder(descriptor)}. Wait for its end, or stop it (kill, as "
            f"Ctrl-C, saves a checkpoint first), or choose another experiment_name ({directory})"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _holder(descriptor: int) -> str:
    """What the holder wrote about itself."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = json.loads(os.read(descriptor, 4096))
        return f"process {holder['pid']} on {holder['host']} has it since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process has it"


def _let_go() -> None:
    """In a forked child, which would keep the lock beyond the end of its parent."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
