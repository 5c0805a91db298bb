"""The example with Claude Code: each repair by a script that mends it, and one that does nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from coding_agents import PROGRAMS
from framework_checks import check_records

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.mark.parametrize(("diligent", "reward"), [(True, 1.0), (False, 0.0)], ids=["mended", "left as it was"])
def test_the_check_decides(rollouts: Any, monkeypatch: pytest.MonkeyPatch, diligent: bool, reward: float) -> None:
    monkeypatch.setenv("PATH", str(PROGRAMS), prepend=":")
    from coding_agent.agent import REPAIRS, run_agent
    from coding_agent.main import MENDS, says

    tasks = [json.loads(line) for line in (REPAIRS / "train.jsonl").read_text().splitlines()]
    for task in tasks:
        served = rollouts(says(MENDS[task["folder"]] if diligent else None))
        (rollout,) = check_records(served.engine, served.run(run_agent, tasks=[task]))
        assert rollout.reward == reward, (task["folder"], rollout.error)
        assert [call.parent for call in rollout.calls] == ([None, 0] if diligent else [None])
