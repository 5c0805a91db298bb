"""A command that leaves children behind which do all they can to live on.

    python stubborn.py FOLDER SECONDS    a file of each in FOLDER, then sleeps

All hold a lock on FOLDER/.lives for as long as one of them lives. Each ignores SIGTERM, SIGINT and SIGHUP; one is a
child, one a session of its own, one forked twice and has lost its parents, one starts a new child and ends, without
a pause.
"""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
LIFE_S = 600.0


def live(name: str) -> None:
    (FOLDER / name).touch()
    until = time.monotonic() + LIFE_S
    while time.monotonic() < until:
        if name != "forking":
            time.sleep(0.05)
        if name == "forking" and os.fork():
            os._exit(0)


def child(name: str, *, session: bool = False, orphan: bool = False) -> None:
    if os.fork():
        return
    if session:
        os.setsid()
    if orphan and os.fork():
        os._exit(0)
    live(name)
    os._exit(0)


held = (FOLDER / ".lives").open("w")
fcntl.flock(held, fcntl.LOCK_SH)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child("child")
child("session", session=True)
child("orphan", session=True, orphan=True)
child("forking", session=True, orphan=True)
while len(list(FOLDER.glob("[!.]*"))) < 4:
    time.sleep(0.01)
print("all are there", flush=True)
time.sleep(float(sys.argv[2]))
