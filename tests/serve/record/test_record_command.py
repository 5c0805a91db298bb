"""`sharpen record` as a command: the page's program, how it ends, what is left after a kill."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import forked, line_of
from upstream_like_vllm import Fake

from sharpen.cli.main import BAD_INPUT, main
from sharpen.config.sections import GatewayConfig
from sharpen.gateway.listening import AppServer
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups
from sharpen.placement.serving import ServingThread

PAGE = Path(__file__).parents[3] / "docs" / "use" / "record.md"
KEY = "the-key"
ASK = [{"role": "user", "content": "quest?"}]


@pytest.fixture
def upstream() -> Iterator[str]:
    """A server that answers as vLLM's does."""

    async def start(fake: Fake) -> AppServer:
        server = AppServer(fake, GatewayConfig(), log_level="critical")
        await server.start()
        return server

    with contextlib.closing(ServingThread()) as thread:
        server = thread.call(start(Fake(says=["4", "7", "nine"] * 3)))
        yield f"http://127.0.0.1:{server.port}/v1"
        thread.call(server.stop())


@contextlib.contextmanager
def recording(upstream: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    arguments = ("--upstream", upstream, "--dir", str(folder), "--port", "0", "--api-key", KEY)
    with forked("-m", "sharpen.cli.main", "record", *arguments) as process:
        while not (line := line_of(process)).startswith("recording"):
            pass
        yield process, line.split()[3].removesuffix("/v1")


def post(url: str, key: str = KEY, **body):
    reply = httpx.post(url, headers={"authorization": f"Bearer {key}"}, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def until_written(folder: Path, reward: float) -> None:
    """Wait until the last session has its reward on disk: it is written after the answer to who gave it."""
    deadline = time.monotonic() + 120
    while [group.rollouts[0].reward for group in read_groups(folder / "run.db", last=1)] != [reward]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_pages_program_is_recorded_and_shown_also_after_a_kill(upstream, tmp_path, capsys):
    folder = tmp_path / "record"
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with recording(upstream, folder) as (process, url):
        environment = {**os.environ, "RECORDER": url, "SHARPEN_API_KEY": KEY}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
        session = post(f"{url}/sessions")
        call = post(f"{url}/v1/chat/completions", session["api_key"], messages=ASK)
        post(f"{url}/feedback", call=call["id"], reward=0.5)
        until_written(folder, 0.5)
        process.kill()
        process.wait()
    groups = list(read_groups(folder / "run.db"))
    assert [group.task.id for group in groups] == ["2 + 2?"] * 4 + ["3 + 4?"] * 4 + [""]
    assert groups[0].task.row == {"question": "2 + 2?", "answer": "4"}
    assert [group.rollouts[0].reward for group in groups] == [1, 0, 0, 1, 1, 0, 0, 1, 0.5]
    assert all(call.trainable for group in groups for call in group.rollouts[0].calls)
    assert main(["show", str(folder)]) == 0
    listed = capsys.readouterr().out
    assert "9 sessions (1 open, 9 with a reward" in listed
    assert main(["show", str(folder), "--rollout", session["id"]]) == 0
    assert "quest?" in capsys.readouterr().out
    for about_training in ("certify", "diagnose"):
        assert main([about_training, str(folder)]) == BAD_INPUT

    with recording(upstream, folder) as (process, url):
        post(f"{url}/v1/chat/completions", session["api_key"], messages=ASK)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert "ending" in output
    (rollout,) = list(read_groups(folder / "run.db"))[-1].rollouts
    assert len(rollout.calls) == 2


def test_a_recording_is_no_run(upstream, tmp_path, capsys):
    with Journal(tmp_path / "run.db"):
        pass
    assert main(["record", "--upstream", upstream, "--dir", str(tmp_path), "--port", "0"]) == BAD_INPUT
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--upstream", "ftp://x"], "ftp://x"),
        (["--upstream", "127.0.0.1:8000"], "127.0.0.1:8000"),
        (["--upstream", "http://h/v1?x=1"], "x=1"),
        (["--upstream", "http://h/v1", "--host", "nowhere"], "nowhere"),
        (["--upstream", "http://h/v1", "--port", "99999"], "99999"),
        (["--upstream", "http://h/v1", "--api-key", "two words"], "two words"),
        (["--upstream", "http://h/v1", "--model", "./none"], "./none"),
    ],
)
def test_bad_input_is_one_clear_message(options, named, tmp_path, capsys):
    assert main(["record", "--dir", str(tmp_path / "r"), *options]) == BAD_INPUT
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error


def test_a_taken_port_leaves_nothing_running(upstream, tmp_path, capsys):
    port = upstream.split(":")[2].removesuffix("/v1")
    assert main(["record", "--upstream", upstream, "--dir", str(tmp_path), "--port", port]) == BAD_INPUT
    assert port in capsys.readouterr().err
    assert not [one for one in threading.enumerate() if one.name == "sharpen-journal"]
