"""Runs commands in containers, by the command line of Docker or Podman.

In: a `Command`, an image or a root folder. Out: `Ended`. Each command has a container of its own (`Container`), or
several have one after the other (`ContainerSession`). A container is removed at the end, whatever happened to it, to
its client, or to this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from sharpen.agent.sandbox.command import Command, Ended, Lifeline, Limits
from sharpen.agent.sandbox.commands import in_thread
from sharpen.agent.sandbox.keeper import Order
from sharpen.agent.sandbox.local import keep, open_files
from sharpen.errors import CommandError, SandboxError

PROGRAMS = {"docker": "host.docker.internal", "podman": "host.containers.internal"}
"""Programs with the same `run`, and the name by which their containers reach this machine."""
OF_THE_CLIENT = re.compile(r"PATH|HOME|TMPDIR|(DOCKER|CONTAINER|XDG|BUILDAH|REGISTRY)\w*|\w+_proxy", re.IGNORECASE)
"""Variables that the client reads itself: those of the command are written out on its command line instead."""
OF_THIS_MACHINE = ("HOME", "TMPDIR", "LANG")
"""Variables of a command that a session has of its own."""
STARTED_S, CLOSED_S = 60.0, 60.0
HELD = ("sh", "-c", "while :; do sleep 3600 & wait; done")
"""What runs in a session's container: it outlives the end of all other processes there, and waits for orphans."""
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
            "environment": {**os.environ, **_without_the_clients(command.environment)},
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
        return _found(command, ended)

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
        return [
            *options,
            *_environment_options(environment),
            *self.options,
            *(["--rootfs", f"{self.root}:O"] if self.root is not None else [str(self.image)]),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSession:
    """A container of an `image` in which several commands run: see `Session`. `start` makes one.

    It has what the image says: user, folder, variables, rights. Its commands are those of whoever made the image.
    """

    client: str
    name: str
    life: Lifeline
    holder: Future[Ended]
    """Ends when the container does."""
    workdir: str | None
    network: str | None
    user: str | None = None

    @classmethod
    def start(
        cls,
        *,
        image: str,
        client: str,
        workdir: str | None = None,
        network: str | None = None,
        options: Sequence[str] = (),
    ) -> ContainerSession:
        """Start a container and wait until commands can be run in it. Blocks. Raises `SandboxError`."""
        name, life = f"sharpen-{secrets.token_hex(8)}", Lifeline()
        more = ["--network", network] if network is not None else []
        if Path(client).name == "docker" and network not in ("host", "none"):
            more += ["--add-host", f"{PROGRAMS['docker']}:host-gateway"]
        order: Order = {
            "arguments": [client, "run", "--rm", "--name", name, *more, *options, image, *HELD],
            "environment": dict(os.environ),
            "folder": "/",
            "time_s": None,
            "memory_bytes": None,
            "afterwards": [client, "rm", "--force", name],
            "remove": "",
            "trainer": -1,
            "open_files": open_files(),
        }
        holder = in_thread(lambda: keep(order, Limits(output_bytes=4000), life, prefix=(), watch=False))
        session = cls(client=client, name=name, life=life, holder=holder, workdir=workdir, network=network)
        try:
            session._wait_until_it_runs()
        except BaseException:
            session.close()
            raise
        return session

    def as_user(self, user: str | None) -> ContainerSession:
        """See `Session.as_user`."""
        return replace(self, user=user)

    def gateway_host(self) -> str | None:
        """The name by which it reaches this machine; None on this machine's own network."""
        return None if self.network == "host" else PROGRAMS[Path(self.client).name]

    def run(self, command: Command, lifeline: Lifeline) -> Ended:
        """See `Sandbox.run`. Where the command does not end by itself, all that runs in the container is ended."""
        environment = {name: value for name, value in command.environment.items() if name not in OF_THIS_MACHINE}
        options = _environment_options(environment)
        options += ["--workdir", self.workdir] if self.workdir is not None else []
        options += ["--user", self.user] if self.user is not None else []
        order: Order = {
            "arguments": [self.client, "exec", *options, self.name, *command.arguments],
            "environment": {**os.environ, **_without_the_clients(environment)},
            "folder": str(command.work),
            "time_s": command.limits.time_s,
            "memory_bytes": None,
            "afterwards": [self.client, "exec", "--user", "0", self.name, "sh", "-c", "kill -9 -1"],
            "remove": str(command.root),
            "trainer": -1,
            "open_files": open_files(),
        }
        ended = keep(order, command.limits, lifeline, prefix=(), watch=False)
        last = _last_line(ended.stderr)
        if ended.ended_by == "" and ended.exit_code and last.startswith("Error") and not self._runs():
            raise SandboxError(f"the container ended before or while {command.arguments[0]!r} ran: {last}")
        return _found(command, ended)

    def put(self, source: Path, target: str) -> None:
        """See `Session.put`."""
        parent = str(PurePosixPath(target).parent)
        self._asked("exec", "--user", "0", self.name, "rm", "-rf", "--", target)
        self._asked("exec", "--user", "0", self.name, "mkdir", "-p", "--", target if source.is_dir() else parent)
        self._asked("cp", f"{source}/." if source.is_dir() else str(source), f"{self.name}:{target}")

    def get(self, source: str, target: Path) -> bool:
        """See `Session.get`."""
        return self._client("cp", f"{self.name}:{source}", str(target)).returncode == 0

    def close(self) -> None:
        """See `Session.close`."""
        self.life.end("the end of the session")
        with contextlib.suppress(Exception):  # told by who waited for it to start
            self.holder.result(CLOSED_S)

    def _wait_until_it_runs(self) -> None:
        until = time.monotonic() + STARTED_S
        while not self._runs():
            if self.holder.done():
                ended = self.holder.result()
                raise SandboxError(f"{self.client} started no container: {_last_line(ended.stderr or ended.stdout)}")
            if time.monotonic() > until:
                raise SandboxError(f"{self.client} started no container within {STARTED_S:.0f} s")
            time.sleep(0.05)

    def _runs(self) -> bool:
        return self._client("exec", self.name, "true").returncode == 0

    def _asked(self, *arguments: str) -> None:
        ended = self._client(*arguments)
        if ended.returncode:
            raise SandboxError(f"{self.client} {' '.join(arguments)} failed: {_last_line(ended.stderr)}")

    def _client(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self.client, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=STARTED_S,
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"{self.client} {arguments[0]} does not answer within {STARTED_S:.0f} s") from error


def _found(command: Command, ended: Ended) -> Ended:
    """Return how a command ended. Raises `CommandError` if there is no such program in the container."""
    if ended.ended_by == "" and ended.exit_code in NOT_STARTED and NOT_FOUND.search(_last_line(ended.stderr)):
        raise CommandError(f"the command {command.arguments[0]!r} cannot be run: {_last_line(ended.stderr)}")
    return ended


def _environment_options(environment: Mapping[str, str]) -> list[str]:
    """Return the options that pass variables."""
    from_client = _without_the_clients(environment)
    named = [name if name in from_client else f"{name}={value}" for name, value in environment.items()]
    return [word for text in named for word in ("--env", text)]


def _without_the_clients(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a command's variables that the client does not read: they go through its environment, where no other
    user of this machine sees them."""
    return {name: value for name, value in environment.items() if not OF_THE_CLIENT.fullmatch(name)}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
