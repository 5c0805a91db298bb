"""The check before a release, with small commands: cut off, gone on with, failed, at another commit."""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lines
import pytest
from lines import ROOT
from processes import forked

BENCH = ROOT / "bench"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("release_check")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, in which parts write down that they ran."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / ".gitignore").write_text("build/\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        git(root, *command)
    return root


def git(root: Path, *arguments: str) -> None:
    person = ("-c", "user.name=x", "-c", "user.email=x@x.test", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *person, *arguments], cwd=root, check=True)


def ran(root: Path) -> list[str]:
    return (root / "build" / "ran").read_text().split()


@pytest.fixture
def part(check: ModuleType) -> Callable[..., Any]:
    return lambda name, then="true": check.Part(name, f"echo {name} >> build/ran; echo figures of {name}; {then}")


def test_all_pass_and_are_not_run_again(check: ModuleType, repository: Path, part: Callable[..., Any]) -> None:
    parts = [part("a"), part("b")]
    assert check.main([], parts, repository) == 0
    assert check.main([], parts, repository) == 0  # the page that it wrote is no change
    assert ran(repository) == ["a", "b"]
    page = (repository / check.PAGE).read_text()
    assert "**2 of 2 passed**" in page
    assert re.search(r"^\| a \| passed \| 0 s \| \d{4}-\d\d-\d\d \d\d:\d\d UTC \|$", page, re.MULTILINE)
    assert "## b\n\n```text\nfigures of b\n```\n" in page
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True).stdout.strip()
    assert f"Commit `{head}`, on " in page


def test_a_failure_is_shown_and_tried_again_last(
    check: ModuleType, repository: Path, part: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a failure is forgotten: by the exit code, by the page, or by the turn after it."""
    parts = [part("a", "test -e build/mended"), part("b"), part("c")]
    assert check.main([], parts, repository) == 1
    assert "failed: a\n" in capsys.readouterr().out
    assert "| a | **failed** (exit code 1) |" in (repository / check.PAGE).read_text()
    (repository / "build" / "mended").touch()
    assert check.main([], [*parts, part("d")], repository) == 0
    assert ran(repository) == ["a", "b", "c", "d", "a"]
    assert "| a | passed, try 2 |" in (repository / check.PAGE).read_text()


def test_a_turn_ends_after_its_minutes(check: ModuleType, repository: Path, part: Callable[..., Any]) -> None:
    assert check.main(["--minutes", "0"], [part("a")], repository) == 3
    assert "Not run yet: a.\n" in (repository / check.PAGE).read_text()
    assert not (repository / "build" / "ran").exists()


def test_at_another_commit_all_begins_anew(
    check: ModuleType, repository: Path, part: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([], [part("a")], repository) == 0
    git(repository, "commit", "-q", "--allow-empty", "-m", "two")
    assert check.main([], [part("a")], repository) == 0
    assert re.search(r"^anew: what was run is of \w{10} on ", capsys.readouterr().out, re.MULTILINE)
    assert ran(repository) == ["a", "a"]


def test_changes_that_no_commit_has_are_refused(
    check: ModuleType, repository: Path, part: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "changed.py").touch()
    assert check.main([], [part("a")], repository) == 2
    assert "?? changed.py" in capsys.readouterr().err


PROGRAM = """
import pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
import release_check as check
signal.signal(signal.SIGTERM, signal.default_int_handler)
slow = "echo $$ > build/pid; echo b >> build/ran; until test -e build/quick; do sleep 0.1; done"
parts = [check.Part("a", "echo a >> build/ran"), check.Part("b", slow), check.Part("c", "echo c >> build/ran")]
sys.exit(check.main([], parts, pathlib.Path(sys.argv[2])))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["told to stop", "killed"])
def test_cut_off_it_goes_on_with_the_part_that_it_was_at(repository: Path, how: signal.Signals) -> None:
    """Red when what has passed is run again, when a part that was cut off counts, or outlives a check told to stop."""
    command = ["-c", PROGRAM, str(BENCH), str(repository)]
    with forked(*command) as first:
        until = time.monotonic() + 120
        while not (repository / "build" / "ran").exists() or ran(repository) != ["a", "b"]:
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        first.send_signal(how)
        assert first.wait(60) != 0
    running = Path("/proc", (repository / "build" / "pid").read_text().strip()).exists()
    assert running == (how == signal.SIGKILL)
    state = json.loads((repository / "build" / "release-check" / "state.json").read_text())
    assert list(state["done"]) == ["a"]
    (repository / "build" / "quick").touch()
    with forked(*command) as second:
        said, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert ran(repository) == ["a", "b", "b", "c"]
    assert "going on: 1 parts were run" in said


def test_whatever_no_change_runs_is_a_part(check: ModuleType) -> None:
    """Red when a benchmark, an example or a long suite is added and not run before a release."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    long = {name for name in phony.split() if name.startswith("bench-") or name.endswith("-slow")} - {"bench-gpu"}
    long |= {"soak", "chaos", "kills", "fuzz-gateway", "quickstart", "test-older-openai"}
    examples = {f"examples/{path.parent.name}" for path in (ROOT / "examples").glob("*/README.md")}
    examples -= {"examples/quickstart", "examples/extend"}  # a suite above; files for runs, which `make test` makes
    assert {part.name for part in check.PARTS} == long | examples | {"kills, with Ray", "results"}
    commands = " ".join(part.command for part in check.PARTS)
    for script in lines.EXAMPLES.keys() | lines.BY_HAND.keys():
        assert script in commands
    for target in re.findall(r"make (\S+)", commands):
        assert target in {*phony.split(), ".venv-ray/installed"}
