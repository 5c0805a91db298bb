"""What docs/reference/results.md is written by, in small: a game, from the lessons to the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sharpen.agent.environments.reasoning_gym import ReasoningGym
from sharpen.config.public import EnvironmentConfig

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = "# A page\n\n<!-- frozen_lake -->\n\nof another day\n\n<!-- end -->\n\nits end\n"


def test_a_result_is_repeated_in_small(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    small = ["--steps=1", "--lessons=5", "--seeds=0,1", f"--page={tmp_path}/page.md", f"--folder={tmp_path}"]
    small += ["--set=evaluation.max_tasks=10", "--set=algorithm.batch_size=2"]
    subprocess.run([sys.executable, str(RESULTS / "repeat.py"), "frozen_lake", *small], check=True)
    head, _, rest = (tmp_path / "page.md").read_text().partition("<!-- frozen_lake -->")
    page, _, end = rest.partition("<!-- end -->")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert (head, end) == ("# A page\n\n", "\n\nits end\n")
    assert [row[0] for row in rows] == ["| seed", "| 0", "| 1", "| mean of 2"]
    assert all(row[5] == "holds" for row in rows[1:3]), rows
    assert "of another day" not in page
    assert "gymnasium 1.4" in page


def test_no_lesson_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 200 sums of two digits, and the lessons are made from another seed. Red without the filter."""
    monkeypatch.syspath_prepend(str(RESULTS))
    from tasks import TASKS

    task = TASKS["chain_sum"]
    environment = EnvironmentConfig(**task.environment)
    held_out = {row["question"] for row in ReasoningGym(environment).tasks("test")}
    taught = {one.question for one in task.lessons(environment, Path())["questions"]}
    assert len(taught) > 100
    assert not taught & held_out
