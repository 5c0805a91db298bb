"""`sharpen view`: the command."""

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from sharpen.cli.main import main


def test_a_folder_that_is_not_there(tmp_path, capsys):
    assert main(["view", str(tmp_path / "nowhere"), "--no-browser"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_port_that_is_taken(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["view", str(tmp_path), "--no-browser", "--port", port]) == 2
    message = capsys.readouterr().err
    assert port in message
    assert "--port" in message


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_this_machine_until_it_is_told_to_end(run, tmp_path, stop):
    """Also with a page that follows a run."""
    command = [sys.executable, "-m", "sharpen.cli.main", "view", str(run), "--no-browser"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"XDG_CACHE_HOME": str(tmp_path), "PATH": ""},
    ) as process:
        assert process.stdout is not None
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", process.stdout.readline())
        assert found is not None
        headers = {"authorization": f"Bearer {found.group(2)}"}
        with httpx.Client(base_url=found.group(1), headers=headers, timeout=60) as client:
            assert client.get("/?format=json").json()["rows"][0]["name"] == run.name
            with client.stream("GET", "/events") as events:
                assert next(events.iter_lines()).startswith(":")
                process.send_signal(stop)
                assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert list(tmp_path.glob("sharpen/view"))
