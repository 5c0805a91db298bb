"""Sessions: several commands in the same files, in a root folder, and in a container by a Podman whose containers are
root folders."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_podman import PLAIN

from sharpen.agent.environments.harbor import Harbor
from sharpen.agent.sandbox.command import Lifeline, Session
from sharpen.agent.sandbox.commands import CommandResult, Commands, Request
from sharpen.agent.sandbox.container import ContainerSession
from sharpen.agent.sandbox.root import Recipe, RootSession, _hold, read_recipe
from sharpen.config.public import EnvironmentConfig
from sharpen.errors import CommandError, SandboxError
from sharpen.testing.environments import served_replies

PATIENCE_S = 60.0
TASKS = Path(__file__).parents[3] / "examples" / "task_folder" / "tasks"


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`podman` in PATH; returns its folder."""
    folder, programs = tmp_path / "podman", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    text = Path(__file__).with_name("fake_podman.py").read_text()
    (programs / "podman").write_text(text.replace("/usr/bin/env python3", sys.executable, 1))
    (programs / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_PODMAN", str(folder))
    return folder


def log(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def ask(session: Session, text: str, user: str | None = None, **options: Any) -> CommandResult:
    commands = Commands(lambda host: {"URL": f"http://{host}:1/v1"})
    try:
        request = Request(arguments=["sh", "-c", text], sandbox=session.as_user(user), **options)
        return asyncio.run(commands.run(request))
    finally:
        commands.remove()


def bash(command: str) -> dict[str, Any]:
    """A reply that calls the tool of our agent."""
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


@pytest.fixture(params=["root", "podman"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    if request.param == "root":
        started: Session = RootSession.start(recipe=Recipe(folder="/app"), context=tmp_path)
    else:
        request.getfixturevalue("podman")
        started = ContainerSession.start(image=PLAIN, client="podman")
    yield started
    started.close()


def test_files_stay_from_command_to_command(session: Session, tmp_path: Path) -> None:
    assert ask(session, "echo a > a; mkdir -p /logs/x; echo b > /logs/x/b; exit 3").exit_code == 3
    assert ask(session, "cat a /logs/x/b; pwd; echo $GIVEN", env={"GIVEN": "g"}).stdout == "a\nb\n/app\ng\n"
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_text("f")
    ask(session, "mkdir /tests; touch /tests/planted")
    session.put(tmp_path / "in", "/tests")
    assert ask(session, "cd /tests; find . -type f").stdout == "./deep/file\n"
    assert session.get("/logs/x", tmp_path / "out")
    assert (tmp_path / "out" / "b").read_text() == "b\n"
    assert not session.get("/nothing", tmp_path / "none")
    commands = Commands(lambda _: {})
    with pytest.raises(CommandError, match="'no-such-command' cannot be run"):
        asyncio.run(commands.run(Request(arguments=["no-such-command"], sandbox=session)))
    assert ask(session, "sleep 600", timeout_s=0.5).timed_out
    assert ask(session, "cat a").stdout == "a\n"


def test_a_root_folder_shows_nothing_else(tmp_path: Path) -> None:
    """Programs are there to be read, and the rights of root end with the folder. Red without the read-only mounts, and
    when capabilities are kept."""
    session = RootSession.start(recipe=Recipe(folder="/app"), context=tmp_path)
    try:
        assert ask(session, f"ls {tmp_path}").exit_code
        assert ask(session, f"ls /..{tmp_path}").exit_code  # where the old root is until it is let go
        refused = ask(session, "touch /usr/x /etc/x; mount --bind /app /tmp; chroot / true; kill -0 2")
        assert len(refused.stderr.splitlines()) == 5, refused.stderr
        assert ask(session, "ls / | tr '\\n' ' '; ls /var /root").stdout.count("home") == 1
        assert ask(session, "grep Cap /proc/self/status | grep -v CapInh").stdout.count("0000000000000000") == 4
        ask(session, f"ln -s {tmp_path} /logs/verifier; ln -s {tmp_path}/secret /app/link")
        (tmp_path / "secret").write_text("s")
        for path in ("/logs/verifier/secret", "/app/../../etc"):
            with pytest.raises(SandboxError, match="leads out of the root folder"):
                session.get(path, tmp_path / "got")
        assert not session.get("/app/link", tmp_path / "got")
        with pytest.raises(SandboxError, match="there is no user 'agent'"):
            session.as_user("agent")
    finally:
        session.close()
    assert not session.place.exists()


def test_another_root_gives_the_programs(tmp_path: Path) -> None:
    """One with two programs and a folder of its own, which no session changes."""
    root = tmp_path / "root"
    for program in ("/bin/sh", "/bin/cat"):
        needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in [program, *re.findall(r"(/\S+) \(0x", needed)]:
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path[1:])
    (root / "srv").mkdir()
    (root / "srv" / "data").write_text("d\n")
    session = RootSession.start(recipe=Recipe(), context=tmp_path, root=root, workdir="/srv")
    try:
        changed = ask(session, "cat data; echo new > data; echo x > /bin/sh; cat data; ls")
        assert changed.stdout == "d\nnew\n"
        assert "Read-only file system" in changed.stderr
        assert "ls: not found" in changed.stderr
    finally:
        session.close()
    assert (root / "srv" / "data").read_text() == "d\n"


def test_no_network_but_the_loopback(tmp_path: Path) -> None:
    session = RootSession.start(recipe=Recipe(), context=tmp_path, network=False)
    try:
        assert ask(session, "tail -n +3 /proc/net/dev | cut -d: -f1").stdout.split() == ["lo"]
        assert ask(session, "cat /proc/net/fib_trie | grep -c 127.0.0.1").stdout.strip() != "0"
    finally:
        session.close()


def test_a_dockerfile_of_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("x")
    (tmp_path / "one.txt").write_text("1")
    (tmp_path / "Dockerfile").write_text(
        "# a comment\nFROM debian:12 AS base\nENV A=1 B='two words'\nENV C three\nWORKDIR /srv/app\nCOPY data ./data\n"
        'COPY ["one.txt", "./"]\nCOPY one.txt /other/name\nRUN echo $A > made && \\\n    pwd >> made\nCMD ["sh"]\n'
    )
    session = RootSession.start(recipe=read_recipe(tmp_path / "Dockerfile"), context=tmp_path)
    try:
        assert ask(session, "pwd; find . -type f | sort").stdout.split() == [
            "/srv/app",
            "./data/x",
            "./made",
            "./one.txt",
        ]
        assert ask(session, "cat /other/name made; echo $B $C").stdout == "11\n/srv/app\ntwo words three\n"
    finally:
        session.close()
    (tmp_path / "Dockerfile").write_text("FROM a\nRUN echo no >&2; exit 4\n")
    with pytest.raises(SandboxError, match=r"RUN echo no >&2; exit 4 fails in a root folder.*: no"):
        RootSession.start(recipe=read_recipe(tmp_path / "Dockerfile"), context=tmp_path)


def test_what_the_program_says_is_told(podman: Path) -> None:
    with pytest.raises(SandboxError, match=r"podman started no container: .*other:1: image not known"):
        ContainerSession.start(image="other:1", client="podman")


def test_a_container_that_is_gone_is_said(podman: Path) -> None:
    session = ContainerSession.start(image=PLAIN, client="podman")
    assert ask(session, "echo Error >&2; exit 1").exit_code == 1
    subprocess.run(["podman", "rm", "--force", session.name], check=True)
    with pytest.raises(SandboxError, match="the container ended before or while 'sh' ran: Error: no container"):
        ask(session, "true")
    session.close()


TRAINER = """
import time
from sharpen.agent.sandbox.container import ContainerSession
session = ContainerSession.start(image="plain:1", client="podman")
print(session.name, flush=True)
time.sleep(600)
"""


HOLDER = """
import os, signal, sys, time
from pathlib import Path
from sharpen.agent.sandbox.root import Recipe, RootSession
session = RootSession.start(recipe=Recipe(), context=Path(sys.argv[1]))
assert (session.place / "app").exists()
print(session.place, flush=True)
time.sleep(float(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_a_root_folder_is_removed_when_the_trainer_is_killed(tmp_path: Path, after_s: float) -> None:
    """While no command runs in it. Red without what holds it."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path), str(after_s)]
    trainer = subprocess.run(command, capture_output=True, text=True)
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    place = Path(trainer.stdout.strip())
    until = time.monotonic() + PATIENCE_S
    while place.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not place.exists()


def test_a_root_folder_is_made_when_it_is_held(tmp_path: Path) -> None:
    """Red where a thread starts what holds it and nothing waits: of 60 trainers that were killed at once, beside others
    that computed, two left their folder."""
    life = Lifeline()
    _hold(tmp_path / "not-yet", life)
    assert life.is_held
    life.end("the end of the test")


def test_the_container_is_removed_when_the_trainer_is_killed(podman: Path) -> None:
    """Red without a keeper that holds it."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    name = trainer.stdout.readline().strip()
    assert (podman / f"{name}.json").exists()
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    until = time.monotonic() + PATIENCE_S
    while (podman / f"{name}.json").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not (podman / f"{name}.json").exists()
    assert ["rm", "--force", name] in log(podman)
    trainer.stdout.close()


async def scored(environment: Harbor, name: str, model: Any) -> float:
    rows = [*environment.tasks("train"), *environment.tasks("test")]
    task = dict(next(row for row in rows if row["name"] == name))
    async with model.client:
        output = await environment.workflow(task=task, model=model)
    return float((await environment.judge(task=task, response=output.response)).reward)


def test_a_task_of_harbor_in_containers(podman: Path) -> None:
    """Image, limits, session, tests, reward; nothing is left of it, also where the workflow is cancelled."""
    docker = podman.parent / "bin" / "docker"  # without its daemon
    docker.write_text("#!/bin/sh\nexit 1\n")
    docker.chmod(0o755)
    settings = {"leave_out": ["greeting"], "held_out": str(TASKS / "greeting")}
    config = EnvironmentConfig(type="harbor", id=str(TASKS), args=settings)
    environment = Harbor(config)
    task = dict(environment.tasks("train")[0])
    assert task["name"] == "sharpen/notes"

    with served_replies([bash("mv notes.txt notes.md"), "Done."]) as (model, _):
        assert asyncio.run(scored(environment, task["name"], model)) == 1.0
    lines = log(podman)
    assert [line[:3] for line in lines if line[0] == "build"] == [["build", "--quiet", "--tag"]]
    assert next(line for line in lines if line[0] == "cp")[1] == f"{TASKS / 'notes' / 'tests'}/."
    assert not list(podman.glob("*.json"))

    async def cancelled(model: Any) -> None:
        task_ = asyncio.ensure_future(scored(environment, task["name"], model))
        while not any("sleep 600" in line for line in log(podman)):
            await asyncio.sleep(0.05)
        task_.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task_

    with served_replies([bash("sleep 600")]) as (model, _):
        asyncio.run(cancelled(model))
    assert not list(podman.glob("*.json"))


PODMAN = os.environ.get("SHARPEN_TEST_PODMAN")
"""A real one. With it goes $SHARPEN_TEST_ROOT, a root folder with bash and what the example's tasks need."""


def with_the_real_podman(tmp_path: Path) -> None:
    """Collected only where one is named: nothing is skipped."""
    program, image = str(PODMAN), "debian:12-slim"
    packed = subprocess.run(
        ["tar", "-C", os.environ["SHARPEN_TEST_ROOT"], "-c", "."], stdout=subprocess.PIPE, check=True
    )
    subprocess.run([program, "import", "-", image], input=packed.stdout, check=True)
    session = ContainerSession.start(image=image, client=program)
    try:
        assert ask(session, "echo a > /a; sleep 600 & echo begun").stdout == "begun\n"
        assert ask(session, "sleep 601", timeout_s=2.0).timed_out
        left = ask(session, "cat /a; for each in /proc/[0-9]*; do tr '\\0' ' ' < $each/cmdline; done").stdout
        assert left.startswith("a\n")
        assert "sleep 60" not in left
        with pytest.raises(CommandError, match="'no-such-command' cannot be run"):
            asyncio.run(Commands(lambda _: {}).run(Request(arguments=["no-such-command"], sandbox=session)))
        assert session.get("/a", tmp_path / "a")
        assert not session.get("/nothing", tmp_path / "nothing")
    finally:
        session.close()
    config = EnvironmentConfig(type="harbor", id=str(TASKS), args={"sandbox": program})
    environment = Harbor(config)
    for solve, reward in ((bash("mv notes.txt notes.md"), 1.0), ("Done.", 0.0)):
        with served_replies([solve, "Done."]) as (model, _):
            assert asyncio.run(scored(environment, "sharpen/notes", model)) == reward
    shown = subprocess.run([program, "ps", "--all", "--quiet"], capture_output=True, text=True)
    assert shown.stdout == ""


if PODMAN is not None:
    test_the_real_podman = with_the_real_podman
