"""What `make` gives the processes that it starts, and that CI leaves out no suite."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"test-slow", "test-agentscope-slow", "test-gpu", "test-older-openai", "test-documented-slow"}
"""Suites that take long, or need what CI has not got: a GPU, further environments."""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_processes_keep_bytecode_whatever_the_shell_says(tmp_path: Path):
    """Red without `unexport`: each process of a suite would compile anew all that it imports, for 10 s and more."""
    probe = f"include {ROOT / 'Makefile'}\nprobe:\n\t@echo found: $$PYTHONDONTWRITEBYTECODE\n"
    (tmp_path / "Makefile").write_text(probe)
    command = ["make", "--file", str(tmp_path / "Makefile"), "probe"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make check`
    environment = {**outside, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "found:\n", done.stderr


def test_ci_runs_every_suite_and_makes_its_environment_before():
    """Red when a suite is left out of `.ci/run`, or an environment out of `environments`."""
    makefile, ran = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text().split()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    suites = {name for name in phony.split() if re.fullmatch(r"test-[a-z-]+", name)} - ELSEWHERE
    assert len(suites) >= 4
    assert suites | {"check", "environments", "quickstart", "docs"} <= set(ran)
    (made,) = re.findall(r"\$\(patsubst %,\.venv-%/installed,(.*)\)", makefile)
    rules = re.findall(r"^(test-[a-z-]+|docs): (.*)$", makefile, re.MULTILINE)
    in_ci = {one for name, needed in rules if name not in ELSEWHERE for one in re.findall(r"\.venv-(\w+)/", needed)}
    assert set(made.split()) == {*in_ci, "agentscope1", "agentscope2"}
