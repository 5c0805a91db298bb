"""The commands of one rollout.

In: requests of the workflow. Out: `CommandResult`s. `stop` ends what runs, `remove` takes the folders away too: when
the rollout ends, from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from sharpen.agent.sandbox.command import Command, Ended, Lifeline, Limits, Sandbox
from sharpen.agent.sandbox.local import Subprocess
from sharpen.errors import CommandError

# The folder of one command: filled before, compared after, removed at the end.
#
# In: a folder to copy, files to write. Out: `Folder`, and `Changes`: what the command created, modified and deleted.

Stamp = tuple[int, int, int]
"""(time of change in ns, size, mode) of a file. The time of change, unlike that of modification, cannot be set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Regular files by path below the folder, sorted. What is behind a link is not followed."""

    created: tuple[str, ...]
    modified: tuple[str, ...]
    deleted: tuple[str, ...]


class Folder:
    """A new folder `root`, of this user alone, with `work` (the command starts there) and `home` (with `tmp`)."""

    def __init__(self, copy: Path | None, files: Mapping[str, str | bytes]) -> None:
        """Raises `CommandError` if `copy` is no folder, or a file's path is not below the folder."""
        if copy is not None and not copy.is_dir():
            raise CommandError(f"folder={str(copy)!r}: there is no such folder")
        self.root = Path(tempfile.mkdtemp(prefix="sharpen-command-"))
        self.work, self.home = self.root / "work", self.root / "home"
        try:
            (self.home / "tmp").mkdir(parents=True)
            if copy is None:
                self.work.mkdir()
            else:
                shutil.copytree(copy, self.work, symlinks=True)
            for name, content in files.items():
                self._write(name, content)
        except BaseException:
            self.remove()
            raise
        self._before = _stamps(self.work)

    def _write(self, name: str, content: str | bytes) -> None:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise CommandError(f"files[{name!r}]: the path must be below the command's folder, like 'src/a.txt'")
        place = self.work / path
        if not place.parent.resolve().is_relative_to(self.work.resolve()) or place.is_symlink() or place.is_dir():
            raise CommandError(f"files[{name!r}]: a link or a folder of the copied folder is in the way")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)

    def changes(self) -> Changes:
        """Compare with the beginning."""
        after = _stamps(self.work)
        before = self._before
        return Changes(
            created=tuple(sorted(after.keys() - before.keys())),
            modified=tuple(sorted(name for name in after.keys() & before.keys() if after[name] != before[name])),
            deleted=tuple(sorted(before.keys() - after.keys())),
        )

    def remove(self) -> None:
        """Remove it, also what the command has protected against that."""
        shutil.rmtree(self.root, ignore_errors=True)
        if self.root.exists():
            for place, _, _ in os.walk(self.root):
                with contextlib.suppress(OSError):
                    os.chmod(place, 0o700)
            shutil.rmtree(self.root, ignore_errors=True)


def _stamps(folder: Path) -> dict[str, Stamp]:
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found[path.relative_to(folder).as_posix()] = (status.st_ctime_ns, status.st_size, status.st_mode)
    return found


END_OF_ROLLOUT = "the end of the rollout"
CANCELLED_S = 15.0
"""How long a cancelled `run` waits for the end of its processes."""
Result = TypeVar("Result")
Environment = Callable[[str | None], Mapping[str, str]]
"""(the name by which the gateway is reached; None: its own) -> the variables from which agents learn their model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a workflow asks for: see `ModelObject.run`. Raises `CommandError` for what cannot be meant."""

    arguments: Sequence[str | os.PathLike[str]]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    folder: str | os.PathLike[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: Sequence[str] = ()
    timeout_s: float | None = None
    memory_mb: float | None = None
    max_processes: int | None = None
    output_bytes: int = 100_000
    keep: bool = False
    sandbox: Sandbox = field(default_factory=Subprocess)

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str | bytes) or not self.arguments:
            raise CommandError(f"a command is a list like ['sh', '-c', 'echo a'], not {self.arguments!r}")
        if isinstance(self.pass_env, str):
            raise CommandError(f"pass_env is a list of names, not {self.pass_env!r}")
        for text in (*self.words, *self.env, *self.env.values()):
            if not isinstance(text, str) or "\0" in text:
                raise CommandError(f"arguments and variables are texts without the character 0, not {text!r}")
        if missing := [name for name in self.pass_env if name not in os.environ]:
            raise CommandError(f"pass_env names variables that are not set: {', '.join(missing)}")
        for name in ("timeout_s", "memory_mb", "max_processes", "output_bytes"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise CommandError(f"{name}={value!r}: it must be a number above 0, or None for no limit")

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments as texts."""
        return tuple(os.fspath(word) if isinstance(word, os.PathLike) else word for word in self.arguments)

    @property
    def limits(self) -> Limits:
        """The limits."""
        return Limits(
            time_s=self.timeout_s,
            memory_mb=self.memory_mb,
            max_processes=self.max_processes,
            output_bytes=self.output_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What became of a command.

    `exit_code` is minus the signal's number if a signal ended it. `ended_by` is empty if it ended by itself, else
    `time`, `memory` or `processes`, the limit that was passed. `created`, `modified` and `deleted` are paths below its
    `folder`, whose bytes can be read until the rollout ends (its judge included; later with `keep=True`).
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    ended_by: str
    folder: Path
    created: tuple[str, ...]
    modified: tuple[str, ...]
    deleted: tuple[str, ...]

    @property
    def timed_out(self) -> bool:
        """Whether it was ended at its time limit."""
        return self.ended_by == "time"

    def read_bytes(self, name: str) -> bytes:
        """Return a file's bytes. Raises `CommandError` if there is no such regular file, or none any more."""
        place = self.folder / name
        if not place.resolve().is_relative_to(self.folder.resolve()) or not place.is_file():
            gone = "" if self.folder.exists() else " any more: the rollout has ended (keep=True keeps its folder)"
            raise CommandError(f"there is no file {name!r} in the command's folder{gone}")
        return place.read_bytes()

    def read_text(self, name: str) -> str:
        """Return a file's text; bytes that are not UTF-8 are replaced."""
        return self.read_bytes(name).decode(errors="replace")


class Commands:
    """The commands of one rollout, and their folders."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._running: set[Lifeline] = set()
        self._folders: list[Folder] = []
        self._stopped = self._removed = False

    async def run(self, request: Request) -> CommandResult:
        """Run a command without blocking the loop. Cancelling ends it, with all that came from it."""
        lifeline = Lifeline()
        future = in_thread(lambda: self._run(request, lifeline))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            lifeline.end(END_OF_ROLLOUT)
            await asyncio.to_thread(_wait, future)
            raise

    def run_sync(self, request: Request) -> CommandResult:
        """Run a command and block this thread until its end."""
        if asyncio._get_running_loop() is not None:
            raise CommandError("run_sync would block the event loop: use `await model.run(...)`")
        return self._run(request, Lifeline())

    def stop(self) -> None:
        """End what runs, and refuse further commands. From any thread; does not wait."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for lifeline in running:
            lifeline.end(END_OF_ROLLOUT)

    def remove(self) -> None:
        """Remove the folders. From any thread; does not wait."""
        self.stop()
        with self._lock:
            self._removed = True
            folders, self._folders = self._folders, []
        if folders:
            threading.Thread(target=_remove, args=(folders,), name="sharpen-remove-folders").start()

    def _run(self, request: Request, lifeline: Lifeline) -> CommandResult:
        with self._lock:
            if self._stopped:
                raise CommandError("the rollout has ended: it runs no further command")
            self._running.add(lifeline)
        folder: Folder | None = None
        try:
            model = self._environment(request.sandbox.gateway_host())
            folder = Folder(None if request.folder is None else Path(request.folder), request.files)
            command = Command(
                arguments=request.words,
                root=folder.root,
                environment=_environment_of(request, folder, model),
                limits=request.limits,
            )
            ended = request.sandbox.run(command, lifeline)
            return _result(ended, folder, folder.changes())
        finally:
            with self._lock:
                self._running.discard(lifeline)
                left = folder if folder is not None and not request.keep else None
                if left is not None and not self._removed:
                    self._folders.append(left)
                    left = None
            if left is not None:
                left.remove()


def _environment_of(request: Request, folder: Folder, model: Mapping[str, str]) -> dict[str, str]:
    """What a command finds: nothing of this process but PATH, which the sandbox adds, LANG, and what is named."""
    return {
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "HOME": str(folder.home),
        "TMPDIR": str(folder.home / "tmp"),
        **model,
        **{name: os.environ[name] for name in request.pass_env},
        **request.env,
    }


def _result(ended: Ended, folder: Folder, changes: Changes) -> CommandResult:
    return CommandResult(
        exit_code=ended.exit_code,
        stdout=ended.stdout,
        stderr=ended.stderr,
        seconds=ended.seconds,
        ended_by=ended.ended_by,
        folder=folder.work,
        created=changes.created,
        modified=changes.modified,
        deleted=changes.deleted,
    )


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run it on a daemon thread of its own: commands last long, and many run at once."""
    future: Future[Result] = Future()

    def target() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the command is awaited
            future.set_exception(error)

    threading.Thread(target=target, name="sharpen-command", daemon=True).start()
    return future


def _wait(future: Future[Any]) -> None:
    """Wait until a command that was told to end has ended."""
    with contextlib.suppress(TimeoutError):
        future.exception(CANCELLED_S)


def _remove(folders: list[Folder]) -> None:
    for folder in folders:
        folder.remove()
