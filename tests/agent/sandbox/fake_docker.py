#!/usr/bin/env python3
"""A Docker without containers: a client of the same command line, and a daemon that starts what it asks for.

As a program: `docker run ...`, `docker rm --force NAME`; it leaves its request in the folder $FAKE_DOCKER and waits. As
a module: `Daemon`, which starts the commands, in sessions of its own as the real one does, so that nothing but `rm`
ends one whose client has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

VALUES = {
    *("--name", "--volume", "--workdir", "--cap-drop", "--security-opt", "--user", "--add-host", "--network"),
    *("--memory", "--memory-swap", "--pids-limit", "--env", "--label"),
}
FLAGS = {"--rm", "--init"}
IMAGE = "agent:1"


def request_of(arguments: list[str]) -> dict[str, Any]:
    """Read the options of `run`, as the real one does; ends with its status if it would."""
    options: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        name = arguments.pop(0)
        if name not in VALUES | FLAGS:
            fail(f"unknown flag: {name}")
        options.setdefault(name, []).append(arguments.pop(0) if name in VALUES else "")
    image, *command = arguments
    if image != IMAGE:
        fail(f"Unable to find image '{image}' locally")
    given = [text.split("=", 1) if "=" in text else [text, os.environ[text]] for text in options.pop("--env")]
    return {"options": options, "command": command, "environment": dict(given)}


def fail(text: str, status: int = 125) -> None:
    """End as the real client does."""
    print(f"docker: {text}", file=sys.stderr)
    sys.exit(status)


def client() -> None:
    """The program."""
    folder, verb = Path(os.environ["FAKE_DOCKER"]), sys.argv[1]
    if verb == "rm":
        (folder / f"{sys.argv[3]}.rm").touch()
        return
    request = request_of(sys.argv[2:])
    place = folder / request["options"]["--name"][0]
    place.with_suffix(".new").write_text(json.dumps(request))
    place.with_suffix(".new").rename(place.with_suffix(".json"))
    while not place.with_suffix(".exit").exists():
        time.sleep(0.01)
    sys.stdout.write(place.with_suffix(".out").read_text())
    sys.stderr.write(place.with_suffix(".err").read_text())
    status = int(place.with_suffix(".exit").read_text())
    if status == 127 and place.with_suffix(".missing").exists():
        fail(f'exec: "{request["command"][0]}": executable file not found in $PATH: unknown.', 127)
    sys.exit(status)


class Daemon:
    """Starts what clients ask for. `requests` are those it has seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[dict[str, Any]] = []
        self.running: dict[str, subprocess.Popen[str]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End everything."""
        self._closed.set()
        self._thread.join()
        for name in list(self.running):
            self._kill(name)

    def _serve(self) -> None:
        while not self._closed.wait(0.01):
            for path in self.folder.glob("*.json"):
                self._start(path.stem, json.loads(path.read_text()))
                path.unlink()
            for path in self.folder.glob("*.rm"):
                self._kill(path.stem)
                path.unlink()
            for name, process in list(self.running.items()):
                if process.poll() is not None:
                    self._end(name, process.returncode)

    def _start(self, name: str, request: dict[str, Any]) -> None:
        self.requests.append(request)
        place = self.folder / name
        environment = {"PATH": os.environ["PATH"], **request["environment"]}
        with place.with_suffix(".out").open("w") as out, place.with_suffix(".err").open("w") as err:
            try:
                self.running[name] = subprocess.Popen(
                    request["command"],
                    cwd=request["options"]["--workdir"][0],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    text=True,
                )
            except OSError:
                place.with_suffix(".missing").touch()
                self._end(name, 127)

    def _kill(self, name: str) -> None:
        if (process := self.running.get(name)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _end(self, name: str, status: int) -> None:
        self.running.pop(name, None)
        place = self.folder / f"{name}.exit"
        place.with_suffix(".tmp").write_text(str(status if status >= 0 else 128 - status))
        place.with_suffix(".tmp").rename(place)


if __name__ == "__main__":
    client()
