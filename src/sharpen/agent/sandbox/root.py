"""Runs commands in a root folder of their own, by namespaces of Linux alone: a session where there is no Docker.

In: a Dockerfile's lines and its folder, and where programs are: this machine's own, or those of another root folder.
Out: `RootSession`. Programs are there to be read; everything else is the session's own folder, which is removed with
it. No image is made: `FROM` is passed over, and `RUN` runs anew in each session.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from sharpen.agent.sandbox.command import Command, Ended, Lifeline, Limits
from sharpen.agent.sandbox.commands import in_thread
from sharpen.agent.sandbox.enter import DEVICES, FAILED, Spec
from sharpen.agent.sandbox.keeper import Order
from sharpen.agent.sandbox.local import keep, open_files, path_here
from sharpen.errors import CommandError, DatasetError, SandboxError

ENTER = Path(__file__).with_name("enter.py")
APART = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
PROGRAMS = re.compile(r"bin|sbin|lib\w*|usr|etc|opt|nix")
"""Folders at the top of a root that hold programs. Of another root than `/`, the rest is copied."""
_MADE = ("app", "dev", "home", "logs", "proc", "root", "run", "tmp", "tmp/shm", "var", "var/tmp")
_OF_NO_ROOT = {"proc", "sys", "dev", "run", "tmp", "boot", "mnt", "media", "lost+found", ".dockerenv"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_OVER = {"FROM", "LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "SHELL", "STOPSIGNAL"}
"""Lines of a Dockerfile that change nothing in files, or that a session replaces."""
_BUILD_S = 600.0
_CLOSED = "the end of the session"
_ROOT_USERS = (None, "root", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a Dockerfile does to files: (`COPY`, sources, target) and (`RUN`, command) in their order."""

    steps: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/"


def read_recipe(dockerfile: Path) -> Recipe:
    """Read a Dockerfile. Raises `DatasetError` for a line that needs a container."""
    steps: list[tuple[str, tuple[str, ...], str]] = []
    environment: dict[str, str] = {}
    folder = PurePosixPath("/")
    for line in _lines(dockerfile.read_text(encoding="utf-8")):
        word, _, rest = line.partition(" ")
        kind, rest = word.upper(), rest.strip()
        if kind in ("WORKDIR", "COPY", "ADD", "ENV") and "$" in rest:
            raise _needs_a_container(dockerfile, line)
        if kind == "WORKDIR":
            folder /= rest
            steps.append(("COPY", (), _writable(dockerfile, line, folder)))
        elif kind == "ENV":
            environment |= _variables(dockerfile, line, rest)
        elif kind == "RUN":
            if rest.startswith(("-", "[", "<<")):
                raise _needs_a_container(dockerfile, line)
            steps.append(("RUN", (str(folder),), rest))
        elif kind in ("COPY", "ADD"):
            *sources, target = _words(dockerfile, line, rest)
            if not sources or any(one.startswith(("-", "http:", "https:")) or "*" in one for one in sources):
                raise _needs_a_container(dockerfile, line)
            place = _writable(dockerfile, line, folder / target)
            steps.append(("COPY", tuple(sources), place + "/" * (target.endswith(("/", ".")) or len(sources) > 1)))
        elif kind not in _PASSED_OVER:
            raise _needs_a_container(dockerfile, line)
    return Recipe(steps=tuple(steps), environment=environment, folder=str(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSession:
    """A root folder in which several commands run: see `Session`. `start` makes one.

    Its commands are root of their own namespace, without rights beyond it. They have this machine's network, or none.
    Whatever a command started ends with it, so that no server outlives the command.
    """

    place: Path
    programs: Mapping[str, str]
    folder: str
    environment: Mapping[str, str]
    network: bool
    memory_mb: float | None
    life: Lifeline
    """Ends what removes the folder if this process is killed."""

    @classmethod
    def start(
        cls,
        *,
        recipe: Recipe,
        context: Path,
        root: Path = Path("/"),
        workdir: str | None = None,
        network: bool = True,
        memory_mb: float | None = None,
    ) -> RootSession:
        """Make the folder. `context` is what the recipe copies from. Blocks. Raises `SandboxError`."""
        check_namespaces()
        if (top := PurePosixPath(workdir or "/").parts[1:2]) and PROGRAMS.fullmatch(top[0]):
            raise SandboxError(f"the folder {workdir} is among programs, which a root folder reads: use a container")
        place, life = Path(tempfile.gettempdir(), f"sharpen-root-{secrets.token_hex(8)}"), Lifeline()
        _hold(place, life)
        try:
            place.mkdir(mode=0o700)
            session = cls(
                place=place,
                programs=_furnish(place, root),
                folder=workdir or recipe.folder,
                environment=recipe.environment,
                network=network,
                memory_mb=memory_mb,
                life=life,
            )
            session._inside(session.folder).mkdir(parents=True, exist_ok=True)
            for kind, sources, target in recipe.steps:
                if kind == "RUN":
                    session._build(target, sources[0])
                else:
                    session._copy(context, sources, target)
        except BaseException:
            life.end(_CLOSED)
            _remove(place)
            raise
        return session

    def gateway_host(self) -> None:
        """It reaches the gateway at its own address."""

    def as_user(self, user: str | None) -> RootSession:
        """See `Session.as_user`. Only root is there."""
        if user not in _ROOT_USERS:
            raise SandboxError(f"there is no user {user!r} in a root folder: use Docker or Podman for this task")
        return self

    def run(self, command: Command, lifeline: Lifeline) -> Ended:
        """See `Sandbox.run`."""
        spec: Spec = {
            "root": str(self.place),
            "programs": dict(self.programs),
            "folder": self.folder,
            "loopback": not self.network,
        }
        own = {"PATH": _PATH, "HOME": "/root", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        given = {name: value for name, value in command.environment.items() if name not in own}
        order: Order = {
            "arguments": [sys.executable, "-I", "-S", str(ENTER), json.dumps(spec), *command.arguments],
            "environment": {**own, **self.environment, **given},
            "folder": "/",
            "time_s": command.limits.time_s,
            "memory_bytes": None,
            "afterwards": [],
            "remove": str(self.place),
            "trainer": -1,
            "open_files": open_files(),
        }
        limits = replace(command.limits, memory_mb=command.limits.memory_mb or self.memory_mb)
        apart = (*APART, *(() if self.network else ("--net",)), "--")
        ended = keep(order, limits, lifeline, prefix=apart)
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        if ended.ended_by == "" and ended.exit_code == FAILED and last.startswith("the root folder"):
            raise SandboxError(last)
        if ended.ended_by == "" and ended.exit_code in (126, 127) and last.endswith(f": {command.arguments[0]}"):
            raise CommandError(f"the command {command.arguments[0]!r} cannot be run in {self.place}: {last}")
        return ended

    def put(self, source: Path, target: str) -> None:
        """See `Session.put`."""
        place = self._inside(target)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        _copied(source, place)

    def get(self, source: str, target: Path) -> bool:
        """See `Session.get`."""
        place = self._inside(source)
        if place.is_symlink() or not (place.is_file() or place.is_dir()):
            return False
        _copied(place, target)
        return True

    def close(self) -> None:
        """See `Session.close`."""
        self.life.end(_CLOSED)
        _remove(self.place)

    def _inside(self, path: str) -> Path:
        """Return where a path of the session is. Raises `SandboxError` if a link of its commands leads it elsewhere."""
        place = self.place / PurePosixPath("/", path).relative_to("/")
        holds = place if place == self.place else place.parent  # a link itself is not followed
        if ".." in place.parts or not holds.resolve().is_relative_to(self.place.resolve()):
            raise SandboxError(f"{path} leads out of the root folder")
        return place

    def _copy(self, context: Path, sources: tuple[str, ...], target: str) -> None:
        """Copy as `COPY` does: a folder's content into the target; a file into it if it ends in a slash, else as it."""
        place = self._inside(target)
        if not sources or target.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
        for source in sources:
            path = (context / source).resolve()
            if not path.exists() or not path.is_relative_to(context.resolve()):
                raise SandboxError(f"the Dockerfile copies {source!r}, which {context} does not have")
            place.parent.mkdir(parents=True, exist_ok=True)
            _copied(path, place / path.name if path.is_file() and place.is_dir() else place)

    def _build(self, line: str, folder: str) -> None:
        with tempfile.TemporaryDirectory(prefix="sharpen-command-") as outside:
            (Path(outside) / "work").mkdir()
            command = Command(
                arguments=("sh", "-c", line), root=Path(outside), environment={}, limits=Limits(time_s=_BUILD_S)
            )
            ended = replace(self, folder=folder, network=True).run(command, Lifeline())
        if ended.exit_code or ended.ended_by:
            said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
            raise SandboxError(
                f"RUN {line} fails in a root folder, whose programs cannot be changed: {said[-1] if said else '?'}"
            )


@functools.cache
def check_namespaces() -> None:
    """Raise `SandboxError` where there are none."""
    try:
        tried = subprocess.run([*APART, "--", "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        problem = tried.stderr.strip() if tried.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        raise SandboxError(
            f"this system lets nobody have a root folder ({problem}): use Docker or Podman, or allow user namespaces"
        )


def _hold(place: Path, life: Lifeline) -> None:
    """Have the folder removed if this process is killed while no command runs in it. When this returns that is so: a
    folder that is made afterwards is not left, whenever this process ends. Raises `SandboxError`.
    """
    order: Order = {
        "arguments": ["sleep", "infinity"],
        "environment": {"PATH": path_here()},
        "folder": "/",
        "time_s": None,
        "memory_bytes": None,
        "afterwards": [],
        "remove": str(place),
        "trainer": -1,
        "open_files": open_files(),
    }
    holder = in_thread(lambda: keep(order, Limits(), life, prefix=(), watch=False))
    while not (life.is_held or holder.done()):
        time.sleep(0.001)
    if not life.is_held:
        raise SandboxError(f"nothing would remove {place}: its keeper cannot be started: {holder.exception()}")


def _furnish(place: Path, root: Path) -> dict[str, str]:
    """Make what a root has, and return the folders of programs that are mounted in it."""
    for name in _MADE:
        (place / name).mkdir()
    for name in ("tmp", "var/tmp"):
        (place / name).chmod(0o1777)
    (place / "dev" / "shm").symlink_to("/tmp/shm")
    for name in DEVICES:
        (place / "dev" / name).touch()
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (place / "dev" / name).symlink_to(f"/proc/self/{target}")
    mounted = {}
    for path in root.iterdir():
        if path.name in _OF_NO_ROOT:
            continue
        if PROGRAMS.fullmatch(path.name) and not path.is_symlink():
            (place / path.name).mkdir()
            mounted[path.name] = str(path.resolve())
        elif PROGRAMS.fullmatch(path.name):
            (place / path.name).symlink_to(path.readlink())
        elif root != Path("/"):
            _copied(path, place / path.name)
    return mounted


def _copied(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _remove(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    if place.exists():
        for folder, _, _ in os.walk(place):  # what a command has protected against it
            with contextlib.suppress(OSError):
                os.chmod(folder, 0o700)
        shutil.rmtree(place, ignore_errors=True)


def _lines(text: str) -> list[str]:
    """Return the instructions of a Dockerfile, each as one line."""
    kept = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [line.strip() for line in re.sub(r"\\\s*\n", " ", "\n".join(kept)).splitlines()]


def _words(dockerfile: Path, line: str, rest: str) -> list[str]:
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise DatasetError(f"{dockerfile}: {line!r} cannot be read: {error}") from error
    if len(words) < 2:
        raise DatasetError(f"{dockerfile}: {line!r} names no source or no target")
    return [str(word) for word in words]


def _variables(dockerfile: Path, line: str, rest: str) -> dict[str, str]:
    name, separator, value = rest.partition(" ")
    if separator and "=" not in name:
        return {name: value.strip()}
    pairs = [word.partition("=") for word in shlex.split(rest)]
    if not all(mark for _, mark, _ in pairs):
        raise DatasetError(f"{dockerfile}: {line!r} is no variable: write ENV NAME=value")
    return {name: value for name, _, value in pairs}


def _writable(dockerfile: Path, line: str, path: PurePosixPath) -> str:
    parts = [part for part in path.parts if part not in ("/", ".")]
    if ".." in parts or (parts and PROGRAMS.fullmatch(parts[0])):
        raise _needs_a_container(dockerfile, line)
    return str(PurePosixPath("/", *parts))


def _needs_a_container(dockerfile: Path, line: str) -> DatasetError:
    return DatasetError(
        f"{dockerfile}: {line!r} needs a container, and environment.args.sandbox is 'root': use docker or podman, or "
        "leave the task out by environment.args.leave_out"
    )
