"""What `make` gives the processes that it starts, and that CI leaves out no suite."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import sharpen

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"test-slow", "test-agentscope-slow", "test-gpu", "test-older-openai", "test-documented-slow"}
"""Suites that take long, or need what CI has not got: a GPU, further environments."""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_processes_keep_bytecode_whatever_the_shell_says(tmp_path: Path):
    """Red without `unexport`: each process of a suite would compile anew all that it imports, for 10 s and more."""
    probe = f"include {ROOT / 'Makefile'}\nprobe:\n\t@echo found: $$PYTHONDONTWRITEBYTECODE\n"
    (tmp_path / "Makefile").write_text(probe)
    done = make("--file", str(tmp_path / "Makefile"), "probe", PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout == "found:\n", done.stderr


def test_ci_runs_every_suite_and_makes_its_environment_before():
    """Red when a suite is left out of `.ci/run`, or an environment out of `environments`."""
    makefile, ran = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text().split()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    suites = {name for name in phony.split() if re.fullmatch(r"test-[a-z-]+", name)} - ELSEWHERE
    assert len(suites) >= 4
    assert suites | {"check", "environments", "quickstart", "docs"} <= set(ran)
    (made,) = re.findall(r"for one in (.*); do", makefile)
    rules = re.findall(r"^(test-[a-z-]+|docs): (.*)$", makefile, re.MULTILINE)
    in_ci = {one for name, needed in rules if name not in ELSEWHERE for one in re.findall(r"\.venv-(\w+)/", needed)}
    assert set(made.split()) == {*in_ci, "agentscope1", "agentscope2"}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_help_says_of_each_target_what_it_does():
    """Red when a target is added without a comment right above it, or its comment is cut off from it."""
    done = make("help")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    said = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert said.keys() == set(phony.split())
    assert said["quickstart"] == "Train a real agent on two CPU cores"
    assert [words for words in said.values() if len(words) > 100] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_a_package_is_built_of_its_own_version_alone():
    """Red when a tag of another version would be published: `release.yml` gives its tag to `make dist`."""
    done = make("dist", "--old-file=.venv/installed", TAG="v99.1")
    assert done.returncode == 2
    assert done.stdout.startswith(f"The tag is v99.1, and the version in src/sharpen/__init__.py {sharpen.__version__}")
    assert "rm -rf" not in done.stdout


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make check`
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env={**outside, **environment}, capture_output=True, text=True
    )
