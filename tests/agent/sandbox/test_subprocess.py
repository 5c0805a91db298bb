"""Commands as processes of this machine: what they find, how they end, and that nothing of them lives on."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sharpen.agent.sandbox.command import Sandbox
from sharpen.agent.sandbox.commands import CommandResult, Commands, Request
from sharpen.agent.sandbox.local import Subprocess, _death_of, namespace
from sharpen.errors import CommandError, SandboxError

STUBBORN = Path(__file__).with_name("stubborn.py")
NAMES = {"child", "session", "orphan", "forking"}
PATIENCE_S = 120.0
"""What takes longer has not happened; on a loaded machine a new process takes seconds."""


class InSandbox(Commands):
    """The commands of a rollout, all in one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(lambda host: {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "at-key"})
        self.sandbox = sandbox

    async def run(self, request: Request) -> CommandResult:
        return await super().run(dataclasses.replace(request, sandbox=self.sandbox))

    def run_sync(self, request: Request) -> CommandResult:
        return super().run_sync(dataclasses.replace(request, sandbox=self.sandbox))


@pytest.fixture(params=[False, None], ids=["subreaper", "namespace"])
def commands(request: pytest.FixtureRequest) -> Iterator[InSandbox]:
    """`namespace` is one where the system allows it (`test_processes_of_their_own`)."""
    rollout = InSandbox(Subprocess(own_processes=request.param))
    yield rollout
    rollout.remove()


def shell(text: str, **options: Any) -> Request:
    return Request(arguments=["sh", "-c", text], **options)


def python(code: str, **options: Any) -> Request:
    return Request(arguments=[sys.executable, "-c", code], **options)


def run(commands: Commands, request: Request) -> CommandResult:
    return asyncio.run(commands.run(request))


def wait_for(folder: Path) -> None:
    """Wait until all stubborn processes live."""
    until = time.monotonic() + PATIENCE_S
    while {path.name for path in folder.glob("[!.]*")} != NAMES:
        assert time.monotonic() < until, sorted(folder.iterdir())
        time.sleep(0.01)


def somebody_lives(folder: Path) -> bool:
    """Whether one of the stubborn processes holds the lock."""
    with (folder / ".lives").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def nobody_lives(folder: Path) -> bool:
    """Whether all of them have started, and have ended within a moment."""
    wait_for(folder)
    return all_ended(folder)


def all_ended(folder: Path) -> bool:
    """Whether all who held the lock have ended within a moment: they would live for ten minutes."""
    until = time.monotonic() + PATIENCE_S
    while somebody_lives(folder) and time.monotonic() < until:
        time.sleep(0.01)
    return not somebody_lives(folder)


def test_result_of_a_command(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/kept").write_text("as it was")
    (tmp_path / "edited").write_text("before")
    (tmp_path / "gone").write_text("x")
    text = "echo out; echo err >&2; cat given; printf after > edited; rm gone; echo new > sub/new; exit 3"
    began = time.monotonic()
    result = run(commands, shell(text, folder=tmp_path, files={"given": "text\n", "deep/er": b"\xff"}))
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\ntext\n", "err\n")
    assert (result.ended_by, result.timed_out) == ("", False)
    assert 0 < result.seconds < time.monotonic() - began
    assert (result.created, result.modified, result.deleted) == (("sub/new",), ("edited",), ("gone",))
    assert result.read_text("edited") == "after"
    assert result.read_bytes("deep/er") == b"\xff"
    assert (tmp_path / "edited").read_text() == "before", "the owner's folder is copied"


def test_a_change_that_keeps_size_and_time_is_seen(commands: Commands) -> None:
    """Red when files are compared by the time of modification, which anybody can set."""
    text = "touch -r a time; printf 2 > a; touch -r time a; rm time"
    assert run(commands, shell(text, files={"a": "1"})).modified == ("a",)


def test_environment_is_a_fresh_one(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the environment of this process is passed on."""
    monkeypatch.setenv("SECRET_OF_THE_OWNER", "s")
    monkeypatch.setenv("NAMED", "n")
    result = run(commands, shell("env; pwd", pass_env=["NAMED"], env={"ADDED": "a b", "OPENAI_API_KEY": "other"}))
    found = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    for name in ("PWD", "OLDPWD", "SHLVL", "_"):
        found.pop(name, None)  # the shell's own
    assert found.keys() == {*("PATH", "LANG", "HOME", "TMPDIR", "OPENAI_BASE_URL", "OPENAI_API_KEY", "NAMED", "ADDED")}
    assert (found["NAMED"], found["ADDED"], found["OPENAI_API_KEY"]) == ("n", "a b", "other")
    assert found["TMPDIR"] == f"{found['HOME']}/tmp"
    assert Path(found["TMPDIR"]).is_dir()
    assert result.stdout.splitlines()[-1] == str(result.folder)


def test_standard_input_is_closed_and_no_file_of_ours_is_open(commands: Commands) -> None:
    result = run(commands, shell("cat; ls /proc/$$/fd | sort -n | tr '\\n' ' '"))
    assert result.stdout.split() == ["0", "1", "2", *result.stdout.split()[3:]]
    opened = run(commands, python("import os; print(sorted(os.listdir('/proc/self/fd'), key=int)[:-1])"))
    assert opened.stdout == "['0', '1', '2']\n"


def test_folders_last_until_the_end_of_the_rollout(commands: Commands) -> None:
    result = run(commands, shell("echo a > a; mkdir d; echo b > d/b; chmod 500 d"))
    kept = run(commands, shell("echo a > a", keep=True))
    assert result.read_text("a") == "a\n"
    commands.remove()
    until = time.monotonic() + PATIENCE_S
    while result.folder.parent.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not result.folder.parent.exists()
    with pytest.raises(CommandError, match="rollout has ended"):
        result.read_text("a")
    assert kept.read_text("a") == "a\n"
    shutil.rmtree(kept.folder.parent)
    with pytest.raises(CommandError, match="runs no further command"):
        run(commands, shell("true"))


def test_files_behind_links_are_not_read(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    result = run(commands, shell(f"ln -s {tmp_path}/secret link; ln -s {tmp_path} folder; mkfifo pipe"))
    assert result.created == ()
    for name in ("link", "folder/secret", "pipe", "../home", str(tmp_path / "secret")):
        with pytest.raises(CommandError, match="no file"):
            result.read_bytes(name)


def test_output_is_kept_head_and_tail(commands: Commands) -> None:
    code = "import sys; sys.stdout.write('a' * 500_000 + 'b' * 500_000); sys.stderr.write('short')"
    result = run(commands, python(code, output_bytes=1000))
    head, mark, tail = result.stdout.split("\n")
    assert (head, tail) == ("a" * 500, "b" * 500)
    assert "999,000 bytes" in mark
    assert result.stderr == "short"


def test_time_limit(commands: Commands, tmp_path: Path) -> None:
    """On a loaded machine the limit may pass before all have begun: then a longer one is tried."""
    for timeout_s in (1.0, 10.0, 200.0):
        folder = tmp_path / f"{timeout_s:g}"
        folder.mkdir()
        result = run(commands, Request(arguments=[sys.executable, STUBBORN, folder, "600"], timeout_s=timeout_s))
        assert (result.timed_out, result.ended_by, result.exit_code) == (True, "time", -signal.SIGKILL)
        assert timeout_s <= result.seconds < timeout_s + PATIENCE_S
        if "all are there" in result.stdout:
            break
    assert "all are there" in result.stdout
    assert nobody_lives(folder)


def test_what_a_command_leaves_behind_ends_with_it(commands: Commands, tmp_path: Path) -> None:
    """Red without the subreaper: the orphans live on. Red when processes are killed one by one: `forking` gets away."""
    result = run(commands, Request(arguments=[sys.executable, STUBBORN, tmp_path, "0"]))
    assert (result.exit_code, result.ended_by) == (0, "")
    assert result.seconds < PATIENCE_S
    assert nobody_lives(tmp_path)


def test_cancelling_ends_the_whole_tree(commands: Commands, tmp_path: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(commands.run(Request(arguments=[sys.executable, STUBBORN, tmp_path, "600"])))
        await asyncio.to_thread(wait_for, tmp_path)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not somebody_lives(tmp_path), "cancelling waits for the end"

    asyncio.run(main())
    assert nobody_lives(tmp_path)


def test_the_end_of_the_rollout_ends_blocking_commands(commands: Commands, tmp_path: Path) -> None:
    """A thread cannot be cancelled: `stop` (which a session's `close` calls) ends its command."""
    results: list[CommandResult] = []
    request = Request(arguments=[sys.executable, STUBBORN, tmp_path, "600"])
    thread = threading.Thread(target=lambda: results.append(commands.run_sync(request)))
    thread.start()
    wait_for(tmp_path)
    commands.stop()
    thread.join(PATIENCE_S)
    assert results[0].ended_by == "the end of the rollout"
    assert nobody_lives(tmp_path)


TRAINER = """
import asyncio, sys
from sharpen.agent.sandbox.commands import Commands, Request
from sharpen.agent.sandbox.local import Subprocess
arguments = [sys.executable, {stubborn!r}, {folder!r}, "600"]
request = Request(arguments=arguments, sandbox=Subprocess(own_processes={own_processes}))
asyncio.run(Commands(lambda host: {{}}).run(request))
"""

FORKS = """
import os, pathlib, tempfile, threading, time
def fork():
    told = pathlib.Path(tempfile.gettempdir(), "fork")
    while not told.exists():
        time.sleep(0.01)
    told.unlink()
    os.fork() or time.sleep(600)
threading.Thread(target=fork).start()
"""


@pytest.mark.parametrize("own_processes", [False, None])
@pytest.mark.parametrize("forked", [False, True])
def test_the_death_of_the_trainer_ends_the_whole_tree(tmp_path: Path, forked: bool, own_processes: bool | None) -> None:
    """By SIGKILL. `forked`: another process holds the lifeline open, as one does that was forked from the trainer."""
    folder, place = tmp_path / "pids", tmp_path / "tmp"
    folder.mkdir()
    place.mkdir()
    code = TRAINER.format(stubborn=str(STUBBORN), folder=str(folder), own_processes=own_processes)
    if forked:
        code = code.replace("asyncio.run", FORKS + "asyncio.run")
    trainer = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(place)})
    wait_for(folder)
    others = []
    if forked:
        (place / "fork").touch()
        until = time.monotonic() + PATIENCE_S
        while not (others := _children(trainer.pid, "python")) and time.monotonic() < until:
            time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    try:
        assert len(others) == forked
        assert nobody_lives(folder)
        until = time.monotonic() + PATIENCE_S
        while list(place.iterdir()) and time.monotonic() < until:
            time.sleep(0.01)
        assert list(place.iterdir()) == [], "its folder is removed too"
    finally:
        for other in others:
            os.kill(other, signal.SIGKILL)


def _children(parent: int, name: str) -> list[int]:
    """The children of a process that were forked without a new program."""
    own = Path(f"/proc/{parent}/cmdline").read_bytes()
    found = []
    for place in Path("/proc").iterdir():
        try:
            stat, line = (place / "stat").read_text(), (place / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if stat.rpartition(")")[2].split()[1:2] == [str(parent)] and line == own:
            found.append(int(place.name))
    return found


def test_a_command_that_ends_its_keeper_is_an_error_of_the_sandbox(tmp_path: Path) -> None:
    """It ends with it."""
    code = (
        "import fcntl, os, time\n"
        f"held = open('{tmp_path}/.lives', 'w'); fcntl.flock(held, fcntl.LOCK_SH)\n"
        "os.kill(os.getppid(), 9); time.sleep(600)"
    )
    rollout = InSandbox(Subprocess(own_processes=False))
    with pytest.raises(SandboxError, match="keeper"):
        run(rollout, python(code))
    assert all_ended(tmp_path)
    rollout.remove()


def test_processes_of_their_own() -> None:
    """With a namespace the keeper cannot be ended, and this process is not there. Without one, that is said."""
    prefix, problem = namespace()
    rollout = InSandbox(Subprocess(own_processes=True))
    if not prefix:
        with pytest.raises(SandboxError, match="own_processes=True") as error:
            run(rollout, shell("true"))
        assert problem in str(error.value)
        return
    result = run(rollout, shell(f"kill -KILL $PPID; ls /proc | grep -c '^[0-9]'; kill -0 {os.getpid()} || echo nobody"))
    assert result.stdout.split()[1:] == ["nobody"]
    assert int(result.stdout.split()[0]) <= 4  # keeper, shell, ls, grep
    rollout.remove()


def test_signals_to_the_keeper_are_ignored(commands: Commands) -> None:
    assert run(commands, shell("kill -TERM $PPID; kill -INT $PPID; kill -HUP $PPID; echo on")).stdout == "on\n"


def test_memory_of_one_process(commands: Commands) -> None:
    result = run(commands, python("a = bytearray(400 << 20)", memory_mb=200))
    assert result.exit_code == 1
    assert "MemoryError" in result.stderr


def test_memory_of_all_processes(commands: Commands) -> None:
    code = "import os, time\nfor _ in range(3): os.fork()\na = bytearray(os.urandom(1 << 20) * 60); time.sleep(600)"
    result = run(commands, python(code, memory_mb=200, timeout_s=500))
    assert (result.ended_by, result.exit_code) == ("memory", -signal.SIGKILL)


def test_number_of_processes(commands: Commands) -> None:
    result = run(commands, shell("for i in 1 2 3 4 5 6 7 8; do sleep 600 & done; wait", max_processes=5, timeout_s=500))
    assert result.ended_by == "processes"
    within = run(commands, shell("for i in 1 2 3; do sleep 0.6 & done; wait; echo done", max_processes=5))
    assert (within.stdout, within.ended_by) == ("done\n", "")


WRONG: list[tuple[Mapping[str, Any], str]] = [
    ({"arguments": "echo a"}, "a command is a list"),
    ({"arguments": []}, "a command is a list"),
    ({"arguments": ["echo", 3]}, "not 3"),
    ({"arguments": ["echo", "a\0b"]}, "character 0"),
    ({"arguments": ["no-such-command"]}, "'no-such-command' is not found"),
    ({"arguments": ["/etc"]}, "may not be run"),
    ({"arguments": ["true", "a" * 200_000]}, "too long"),
    ({"folder": "/no/such/folder"}, "'/no/such/folder'"),
    ({"files": {"../a": ""}}, "'../a'"),
    ({"files": {"/a": ""}}, "below the command's folder"),
    ({"timeout_s": 0}, "timeout_s=0"),
    ({"timeout_s": float("nan")}, "timeout_s=nan"),
    ({"memory_mb": -1}, "memory_mb=-1"),
    ({"max_processes": 0}, "max_processes=0"),
    ({"output_bytes": 0}, "output_bytes=0"),
    ({"env": {"A": 1}}, "not 1"),
    ({"pass_env": "PATH"}, "a list of names"),
    ({"pass_env": ["PATH", "NOT_SET_ANYWHERE"]}, "not set: NOT_SET_ANYWHERE"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_cannot_be_run_is_one_clear_error(commands: Commands, given: Mapping[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=said) as error:
        run(commands, Request(**{"arguments": ["true"], **given}))
    assert "\n" not in str(error.value)


def test_a_link_in_the_copied_folder_does_not_lead_files_out(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/out").symlink_to(tmp_path)
    with pytest.raises(CommandError, match="in the way"):
        run(commands, Request(arguments=["true"], folder=tmp_path / "in", files={"out/a": "x"}))
    assert not (tmp_path / "a").exists()


def test_many_at_once(commands: Commands) -> None:
    async def main() -> list[CommandResult]:
        return await asyncio.gather(*(commands.run(shell(f"sleep 0.2; echo {i}")) for i in range(40)))

    assert [int(result.stdout) for result in asyncio.run(main())] == list(range(40))


def test_where_more_than_a_thousand_files_are_open(commands: Commands) -> None:
    """The keeper inherits a file under its number here. Red with `select.select`, which takes no number above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    opened = [os.dup(0) for _ in range(1100)]
    try:
        _death_of.cache_clear()
        assert run(commands, shell("echo a")).stdout == "a\n"
    finally:
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_commands_are_no_matter_of_open_files() -> None:
    """This process may have more of them open than it started with; commands may have as many as it had before the
    gateway, too, raised that."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(7)[1]))\n"
        "from sharpen.config.sections import GatewayConfig\n"
        "from sharpen.gateway.listening import raise_file_limit\n"
        "from sharpen.agent.sandbox.commands import Commands, Request\n"
        "raise_file_limit(GatewayConfig(max_connections=300))\n"
        "commands = Commands(lambda host: {})\n"
        "print(commands.run_sync(Request(arguments=['sh', '-c', 'ulimit -n'])).stdout.strip()); commands.remove()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert shown[0] == "256"
    assert int(shown[1]) == min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65_536)


def test_run_sync_does_not_block_a_loop(commands: Commands) -> None:
    async def main() -> None:
        commands.run_sync(shell("true"))

    with pytest.raises(CommandError, match=r"await model\.run"):
        asyncio.run(main())
