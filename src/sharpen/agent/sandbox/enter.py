"""Enters a root folder and becomes a command there: `python enter.py SPEC COMMAND...`, standard library only.

It runs in new namespaces of users, mounts and processes, as their root. In: a JSON spec, see `Spec`. It mounts the
programs for reading, some devices and `/proc`, makes the folder its root, lets the old one go, gives up every right
that root has over its namespaces, and starts the command.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import socket
import struct
import sys
from typing import TypedDict

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, NOATIME, NODIRATIME, BIND, REC, RELATIME = (
    *(1, 2, 4, 8, 32, 1024, 2048, 4096, 16384, 1 << 21),
)
ST_RELATIME = 4096
"""What `statvfs` says for `RELATIME`; its other flags are those of `mount`."""
DETACH, NEW_MOUNTS = 2, 0x20000
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, LAST_CAPABILITY = 24, 38, 63
SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x41
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
FAILED = 125
"""Its exit code where the folder cannot be entered."""
libc = ctypes.CDLL(None, use_errno=True)


class Spec(TypedDict):
    """`root`: the folder. `programs`: folders of this machine by their names in it, which are there to be read.
    `folder`: where the command starts. `loopback`: bring up the network's loopback, the only part of it."""

    root: str
    programs: dict[str, str]
    folder: str
    loopback: bool


def main() -> None:
    """Enter, and become the command."""
    spec: Spec = json.loads(sys.argv[1])
    command = sys.argv[2:]
    try:
        enter(spec)
    except OSError as error:
        print(f"the root folder cannot be entered: {error}", file=sys.stderr)
        sys.exit(FAILED)
    try:
        os.chdir(spec["folder"])
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{error.strerror}: {error.filename or command[0]}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def enter(spec: Spec) -> None:
    """Make the folder the root. Raises `OSError`."""
    root = spec["root"]
    if spec["loopback"]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", UP_AND_RUNNING))
    done(libc.unshare(NEW_MOUNTS), root)  # else the keeper's root would change too
    bind(root, root)
    for name, source in spec["programs"].items():
        bind(source, os.path.join(root, name))
        read_only(os.path.join(root, name))
    for name in DEVICES:
        bind(f"/dev/{name}", os.path.join(root, "dev", name))
    bind("/proc", os.path.join(root, "proc"))
    os.chdir(root)
    done(libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), root)
    done(libc.umount2(b".", DETACH), root)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # those that this kernel does not have fail
    done(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), root)


def bind(source: str, target: str) -> None:
    """Have a file or folder at another place too."""
    done(libc.mount(source.encode(), target.encode(), None, BIND | REC, None), target)


def read_only(place: str) -> None:
    """Let nobody write below a mounted place. What holds for the mount already must be said again."""
    flags = os.statvfs(place).f_flag
    kept = flags & (NOSUID | NODEV | NOEXEC | NOATIME | NODIRATIME)
    kept |= RELATIME if flags & ST_RELATIME else 0
    done(libc.mount(None, place.encode(), None, BIND | REMOUNT | RDONLY | kept, None), place)


def done(result: int, place: str) -> None:
    """Raise `OSError` if a call of the system failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), place)


if __name__ == "__main__":
    main()
