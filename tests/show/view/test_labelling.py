"""Marks come from a browser of this machine with the token, once for each answer, and from nobody else."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from sharpen.evidence.judges.marks import Answer, read_marks
from sharpen.show.view.labelling import Labelling

ANSWERS = [Answer(task={"question": f"question {n}"}, text=f"said {n}", rollout=f"r/{n}") for n in range(2)]
OURS = {"authorization": "Bearer the-token", "host": "127.0.0.1:8123"}


def client(path: Path, **headers: str) -> TestClient:
    app = Labelling(ANSWERS, path).app("the-token", 8123, lambda: False)
    return TestClient(app, base_url="http://127.0.0.1:8123", headers={**OURS, **headers}, follow_redirects=False)


def test_an_answer_is_marked_once(tmp_path: Path):
    """However often a form is sent. Red without the look at what is still open."""
    marks = tmp_path / "m.jsonl"
    ours = client(marks)
    assert "said 0" in ours.get("/").text
    for said in ("good", "good", "bad"):
        assert ours.post("/mark", data={"number": "0", "mark": said}).status_code == 303
    assert [(mark.answer, mark.good) for mark in read_marks(marks)] == [(ANSWERS[0], True)]
    assert "said 1" in ours.get("/").text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer another"}, 401),
        ({"origin": "http://evil.example"}, 403),
        ({"host": "evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_nobody_else_marks(tmp_path: Path, headers: dict[str, str], status: int):
    theirs = client(tmp_path / "m.jsonl", **headers)
    assert theirs.post("/mark", data={"number": "0", "mark": "good"}).status_code == status
    assert theirs.get("/").status_code == status
    assert not (tmp_path / "m.jsonl").exists()


@pytest.mark.parametrize(
    "form", [{}, {"number": "0"}, {"number": "2", "mark": "good"}, {"number": "-1", "mark": "good"}, {"mark": "good"}]
)
def test_what_is_no_mark_is_refused(tmp_path: Path, form: dict[str, str]):
    assert client(tmp_path / "m.jsonl").post("/mark", data=form).status_code == 400
    assert not (tmp_path / "m.jsonl").exists()


def test_a_mark_that_cannot_be_written_is_said_and_asked_for_again(tmp_path: Path):
    ours = client(tmp_path)  # a folder
    refused = ours.post("/mark", data={"number": "0", "mark": "good"})
    assert refused.status_code == 409
    assert str(tmp_path) in refused.text
    assert "said 0" in ours.get("/").text


def test_the_command_serves_the_answers_of_a_run_without_their_rewards(run, tmp_path: Path):
    """And says at its end how many were marked."""
    marks = tmp_path / "marks.jsonl"
    command = ["judge", "label", str(run), "--marks", str(marks), "--most", "3", "--browser", "--no-browser", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "sharpen.cli.main", *command], text=True, **pipes) as process:
        assert process.stderr is not None
        found = None
        while found is None:
            found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", process.stderr.readline())
        headers = {"authorization": f"Bearer {found[2]}"}
        with httpx.Client(base_url=found[1], headers=headers, timeout=60) as ours:
            page = ours.get("/").text
            assert "Answer 1 of 3" in page
            assert "reward" not in page.replace("rewards are not shown", "")
            ours.post("/mark", data={"number": "0", "mark": "bad"})
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out) == {"marks": str(marks), "added": 1, "before": 0}
    assert [mark.good for mark in read_marks(marks)] == [False]
