"""Runs commands in containers, by the command line of Docker or Podman.

In: a `Command`, an image or a root folder. Out: `Ended`. Each command has a container of its own, which is removed at
the end, whatever happened to it, to its client, or to this process.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from sharpen.agent.sandbox.command import Command, Ended, Lifeline
from sharpen.agent.sandbox.keeper import Order
from sharpen.agent.sandbox.local import keep, open_files
from sharpen.errors import CommandError, SandboxError

PROGRAMS = {"docker": "host.docker.internal", "podman": "host.containers.internal"}
"""Programs with the same `run`, and the name by which their containers reach this machine."""
OF_THE_CLIENT = re.compile(r"PATH|HOME|TMPDIR|(DOCKER|CONTAINER|XDG|BUILDAH|REGISTRY)\w*|\w+_proxy", re.IGNORECASE)
"""Variables that the client reads itself: those of the command are written out on its command line instead."""
CLIENT_FAILED = 125
NOT_STARTED = (126, 127)
NOT_FOUND = re.compile(r"executable file|no such file or directory|permission denied", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container for each command, from an `image`, or (Podman) from a `root` folder that is left unchanged.

    `program` is `docker` or `podman`, by name or path; None takes the first of them that is found. The command sees
    the files of the image, its own folder (at the same path as here), and processes of its own; it has the user and
    group of this process, no capabilities, and cannot gain any. `network` is the container's network (None: the
    program's default, `host`: this machine's own); `options` are further options of `run`.
    """

    image: str | None = None
    root: str | os.PathLike[str] | None = None
    program: str | None = None
    network: str | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.image is None) == (self.root is None):
            raise CommandError("a Container is made from an image or from a root folder: name one of them")
        if self.program is not None and Path(self.program).name not in PROGRAMS:
            raise CommandError(f"program={self.program!r}: it must be docker or podman, or a path to one")
        if self.network == "none":
            raise CommandError("network='none': the agent would not reach its model")
        if self.root is not None and self.program is not None and Path(self.program).name != "podman":
            raise CommandError(
                "only Podman starts a container from a root folder; make an image of it for Docker: "
                f"tar -C {os.fspath(self.root)} -c . | docker import - NAME"
            )

    def gateway_host(self) -> str | None:
        """The name by which containers reach this machine; None on its own network."""
        return None if self.network == "host" else PROGRAMS[Path(self._client()).name]

    def run(self, command: Command, lifeline: Lifeline) -> Ended:
        """See `Sandbox.run`."""
        client, name = self._client(), f"sharpen-{secrets.token_hex(8)}"
        order: Order = {
            "arguments": [client, "run", "--name", name, *self._options(command), *command.arguments],
            "environment": {**os.environ, **_without_the_clients(command)},
            "folder": str(command.work),
            "time_s": command.limits.time_s,
            "memory_bytes": None,
            "afterwards": [client, "rm", "--force", name],
            "remove": str(command.root),
            "trainer": -1,
            "open_files": open_files(),
        }
        ended = keep(order, command.limits, lifeline, prefix=(), watch=False)
        if ended.ended_by == "" and ended.exit_code == CLIENT_FAILED:
            raise SandboxError(f"{client} started no container: {_last_line(ended.stderr)}")
        if ended.ended_by == "" and ended.exit_code in NOT_STARTED and NOT_FOUND.search(_last_line(ended.stderr)):
            raise CommandError(f"the command {command.arguments[0]!r} cannot be run: {_last_line(ended.stderr)}")
        return ended

    def _client(self) -> str:
        """Return the path of the program. Raises `SandboxError` if it is not there."""
        names = [self.program] if self.program is not None else ["podman"] if self.root is not None else list(PROGRAMS)
        for name in names:
            if (found := shutil.which(name)) is not None:
                return found
        raise SandboxError(f"a container needs {' or '.join(names)}, which is not in PATH")

    def _options(self, command: Command) -> list[str]:
        """Return the options of `run`, and the image at their end."""
        docker = Path(self._client()).name == "docker"
        root, limits, environment = str(command.root), command.limits, command.environment
        options = ["--rm", "--volume", f"{root}:{root}", "--workdir", str(command.work)]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        options += ["--user", f"{os.geteuid()}:{os.getegid()}"]
        if docker:
            options += ["--init", "--add-host", f"{PROGRAMS['docker']}:host-gateway"]
        elif os.geteuid() != 0:
            options += ["--userns", "keep-id"]
        if self.network is not None:
            options += ["--network", self.network]
        if limits.memory_mb is not None:
            options += ["--memory", f"{int(limits.memory_mb)}m", "--memory-swap", f"{int(limits.memory_mb)}m"]
        if limits.max_processes is not None:
            options += ["--pids-limit", str(limits.max_processes)]
        from_client = _without_the_clients(command)
        for name, value in environment.items():
            options += ["--env", name if name in from_client else f"{name}={value}"]
        return [
            *options,
            *self.options,
            *(["--rootfs", f"{self.root}:O"] if self.root is not None else [str(self.image)]),
        ]


def _without_the_clients(command: Command) -> dict[str, str]:
    """Return the command's variables that the client does not read: they go through its environment, where no other
    user of this machine sees them."""
    return {name: value for name, value in command.environment.items() if not OF_THE_CLIENT.fullmatch(name)}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
