"""Commands in containers: by a Docker whose daemon is a thread here; by a real Podman where one is named.

What the command line says, and that every container is removed, is seen by the fake.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_docker import IMAGE, Daemon

from sharpen.agent.sandbox.commands import CommandResult, Commands, Request
from sharpen.agent.sandbox.container import Container
from sharpen.errors import CommandError, SandboxError

PATIENCE_S = 120.0
"""What takes longer has not happened."""


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """`docker` in PATH, and its daemon."""
    folder, programs = tmp_path / "daemon", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    program = programs / "docker"
    text = Path(__file__).with_name("fake_docker.py").read_text()
    program.write_text(text.replace("/usr/bin/env python3", sys.executable, 1))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(folder))
    started = Daemon(folder)
    yield started
    started.close()


@pytest.fixture
def commands() -> Iterator[Commands]:
    rollout = Commands(lambda host: {"OPENAI_BASE_URL": f"http://{host}:1/v1", "KEY": "at-key"})
    yield rollout
    rollout.remove()


def ask(commands: Commands, text: str, sandbox: Container | None = None, **options: Any) -> CommandResult:
    sandbox = sandbox or Container(image=IMAGE)
    return asyncio.run(commands.run(Request(arguments=["sh", "-c", text], sandbox=sandbox, **options)))


def nothing_runs(daemon: Daemon) -> bool:
    until = time.monotonic() + PATIENCE_S
    while daemon.running and time.monotonic() < until:
        time.sleep(0.01)
    return not daemon.running


def begins(daemon: Daemon) -> None:
    """Wait until something runs."""
    until = time.monotonic() + PATIENCE_S
    while not daemon.running:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_command_in_a_container(daemon: Daemon, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_OWNER", "s")
    monkeypatch.setenv("NAMED", "n")
    result = ask(
        commands,
        "env; pwd; echo err >&2; echo new > made; exit 3",
        files={"given": "x"},
        env={"HTTP_PROXY": "http://proxy"},
        pass_env=["NAMED"],
        memory_mb=512,
        max_processes=64,
    )
    assert (result.exit_code, result.stderr, result.created) == (3, "err\n", ("made",))
    lines = result.stdout.splitlines()
    assert lines[-1] == str(result.folder)
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    assert "SECRET_OF_THE_OWNER" not in found
    assert found["OPENAI_BASE_URL"] == "http://host.docker.internal:1/v1"
    assert (found["NAMED"], found["HTTP_PROXY"]) == ("n", "http://proxy")
    assert found["HOME"] == str(result.folder.parent / "home")
    (request,) = daemon.requests
    options = request["options"]
    assert options["--volume"] == [f"{result.folder.parent}:{result.folder.parent}"]
    assert options["--add-host"] == ["host.docker.internal:host-gateway"]
    assert (options["--memory"], options["--memory-swap"], options["--pids-limit"]) == (["512m"], ["512m"], ["64"])
    assert (options["--cap-drop"], options["--security-opt"]) == (["ALL"], ["no-new-privileges"])
    assert options["--user"] == [f"{os.geteuid()}:{os.getegid()}"]
    assert "--rm" in options


def test_keys_are_not_on_the_command_line(daemon: Daemon, commands: Commands, tmp_path: Path) -> None:
    """Everybody on the machine sees the command lines of others. Red when all variables are written out."""
    seen: list[str] = []

    def look() -> None:
        while not daemon.running:
            time.sleep(0.005)
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                seen.append(place.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        (tmp_path / "seen").touch()

    thread = threading.Thread(target=look)
    thread.start()
    ask(commands, f"while [ ! -e {tmp_path}/seen ]; do sleep 0.05; done")
    thread.join()
    client = [line for line in seen if "docker run" in line]
    assert client
    assert all("--env KEY " in line and "at-key" not in line for line in client)


def test_the_container_ends_at_the_time_limit(daemon: Daemon, commands: Commands) -> None:
    """Its processes do not come from the client. Red without `afterwards`. On a loaded machine the limit may pass
    before the container has begun: then a longer one is tried."""
    for timeout_s in (1.0, 10.0, 100.0):
        result = ask(commands, "sleep 600", timeout_s=timeout_s)
        assert result.timed_out
        if daemon.requests:
            break
    assert daemon.requests
    assert nothing_runs(daemon)


def test_the_container_ends_with_its_rollout(daemon: Daemon, commands: Commands) -> None:
    thread = threading.Thread(target=lambda: (begins(daemon), commands.stop()))
    thread.start()
    assert ask(commands, "sleep 600").ended_by == "the end of the rollout"
    assert nothing_runs(daemon)


TRAINER = """
import asyncio
from sharpen.agent.sandbox.commands import Commands, Request
from sharpen.agent.sandbox.container import Container
request = Request(arguments=["sleep", "600"], sandbox=Container(image="agent:1"))
asyncio.run(Commands(lambda host: {}).run(request))
"""


def test_the_container_ends_with_the_trainer(daemon: Daemon) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER])
    begins(daemon)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert nothing_runs(daemon)


def test_what_docker_says_is_told(daemon: Daemon, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="Unable to find image 'other:1'"):
        ask(commands, "true", Container(image="other:1"))
    with pytest.raises(SandboxError, match="unknown flag: --no-such"):
        ask(commands, "true", Container(image=IMAGE, options=("--no-such",)))
    with pytest.raises(CommandError, match="'no-such-command' cannot be run"):
        asyncio.run(commands.run(Request(arguments=["no-such-command"], sandbox=Container(image=IMAGE))))
    assert ask(commands, "exit 127").exit_code == 127
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="docker or podman, which is not in PATH"):
        ask(commands, "true")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "an image or from a root folder"),
    ({"image": "a", "root": "/"}, "name one of them"),
    ({"image": "a", "program": "lxc"}, "program='lxc'"),
    ({"image": "a", "network": "none"}, "would not reach its model"),
    ({"root": "/r", "program": "docker"}, "docker import"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_containers_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        Container(**given)


def test_the_name_of_this_machine(daemon: Daemon) -> None:
    assert Container(image=IMAGE).gateway_host() == "host.docker.internal"
    assert Container(image=IMAGE, network="host").gateway_host() is None


PODMAN = os.environ.get("SHARPEN_TEST_PODMAN")
"""A real one. With it goes $SHARPEN_TEST_ROOT, a root folder with sh, cat, id and sleep."""


def with_the_real_podman(commands: Commands) -> None:
    """Collected only where one is named: nothing is skipped."""
    program = str(PODMAN)
    sandbox = Container(program=program, root=os.environ["SHARPEN_TEST_ROOT"], network="host")
    result = ask(commands, "id -u; cat given; echo new > made", sandbox, files={"given": "x\n"})
    assert (result.exit_code, result.created) == (0, ("made",)), result.stderr
    assert result.stdout.split()[:2] == [str(os.geteuid()), "x"]
    late = ask(commands, "setsid sleep 600 & sleep 600", sandbox, timeout_s=5.0)
    assert late.timed_out
    shown = subprocess.run([program, "ps", "--all", "--quiet"], capture_output=True, text=True)
    assert shown.stdout == ""
    with pytest.raises(CommandError, match="cannot be run"):
        asyncio.run(commands.run(Request(arguments=["no-such-command"], sandbox=sandbox)))


if PODMAN is not None:
    test_the_real_podman = with_the_real_podman
