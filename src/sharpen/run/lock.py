"""The lock of a run's directory: one process at a time may write there.

In: the directory. Out: an operating-system lock on its file `run.lock`, which names the holder. The kernel releases the
lock when that process ends, however it ends. Reading a run (certify, show, diagnose) needs no lock.
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

from sharpen.config.resuming import ANOTHER_NAME
from sharpen.errors import ConfigError
from sharpen.files import check_links

NAME = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: set[int] = set()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[str]:
    """Lock the run in `directory`. Yield a warning to print if the file system has no locks, else an empty string.

    Raises `ConfigError` with the name of the holder if the run is locked, also by this process; and for a directory
    with links that lead out of it, where a run would write elsewhere.
    """
    try:
        check_links(directory)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(descriptor)
    try:
        is_locked = _lock(descriptor, directory)
        _write_holder(descriptor, {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()})
        try:
            yield "" if is_locked else f"{directory} has no file locks: make sure that no other process uses this run"
        finally:
            if descriptor in _held:  # not in a forked child
                _write_holder(descriptor, {})
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)


def is_working(directory: Path) -> bool:
    """Return whether a process holds the run, by what it wrote into the file: without touching the lock, which a run
    that starts at this moment needs. A holder on another machine is believed."""
    try:
        holder = json.loads((directory / NAME).read_text(encoding="utf-8"))
        if holder["host"] != socket.gethostname():
            return True
        os.kill(int(holder["pid"]), 0)
    except PermissionError:  # it lives, and is another user's
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _write_holder(descriptor: int, holder: Mapping[str, int | str]) -> None:
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, f"{json.dumps(holder)}\n".encode())


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


def _lock(descriptor: int, directory: Path) -> bool:
    """Lock the file; return False if the file system has no locks. Raises `ConfigError` if the file is locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"the run {directory.name!r} is in use: {_holder(descriptor)}. Wait until it ends, stop it (with Ctrl-C "
            f"or kill, which save a checkpoint first), or choose {ANOTHER_NAME}; it is in {directory}"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _holder(descriptor: int) -> str:
    """Describe the holder, from what it wrote into the file."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = json.loads(os.read(descriptor, 4096))
        return f"process {holder['pid']} on {holder['host']} has it since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process has it"


def _close_in_child() -> None:
    """Close the lock files in a forked child, which would otherwise keep the lock after its parent has ended."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
