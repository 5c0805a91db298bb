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
    small = ["--steps=1", "--lessons=2", "--seeds=0", f"--page={tmp_path}/page.md", f"--folder={tmp_path}"]
    small += ["--set=evaluation.max_tasks=10", "--set=algorithm.batch_size=2", "--set=algorithm.group_size=2"]
    subprocess.run([sys.executable, str(RESULTS / "repeat.py"), "frozen_lake", *small], check=True)
    head, _, rest = (tmp_path / "page.md").read_text().partition("<!-- frozen_lake -->")
    page, _, end = rest.partition("<!-- end -->")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert (head, end) == ("# A page\n\n", "\n\nits end\n")
    assert [row[0] for row in rows] == ["| seed", "| 0", "| mean of 1"]
    assert rows[1][5] == "holds", rows
    assert "of another day" not in page
    assert "gymnasium 1.4" in page


def test_a_part_shows_what_failed_and_what_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where a certificate that does not hold, or a run that failed, looks like any other."""
    monkeypatch.syspath_prepend(str(RESULTS))
    from repeat import part

    modes = {"greedy": {"accuracy": 0.25}, "sampled": {"accuracy": 0.5}}
    verdict = {"kind": "not_shown_better", "low": -0.25, "high": 0.5}
    summary = {"before": modes, "after": modes, "verdict": verdict, "seconds": 90.0}
    runs = [{"seed": 0, "exit_code": 0, "gain": 0.125, "summary": summary}, {"seed": 1, "exit_code": 1}]
    mean = {"mean": 0.25, "count": 1, "low": None, "high": None}
    spread = dict.fromkeys(("greedy before", "greedy after", "sampled before", "sampled after", "gain"), mean)
    page = part("chain_sum", {"runs": runs, "spread": spread}, {0: False, 1: False}, "c0ffee", "5eed")
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [
            "0",
            "0.250 → 0.250",
            "0.500 → 0.500",
            "+0.125 [-0.250, +0.500]",
            "not shown better",
            "**does not hold**",
            "1.5",
        ],
        ["1", "", "", "", "failed with exit code 1", "", ""],
        ["mean of 1", "0.250 → 0.250", "0.250 → 0.250", "+0.250 [unknown]", "", "", ""],
    ]
    assert "its folder at `5eed`" in page


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
