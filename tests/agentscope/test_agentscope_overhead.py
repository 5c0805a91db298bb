"""The benchmark of what AgentScope costs runs, in small: by its documented line, where AgentScope is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import agentscope

SCRIPT = Path(__file__).parents[2] / "bench" / "agentscope_overhead.py"


def test_it_measures_in_small(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rollouts", "2", "--repeats", "1"]
    environment = {**os.environ, "BENCH_OUT": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "agentscope_overhead.json").read_text())
    assert found["agentscope"] == agentscope.__version__
    assert found["agent_ms"] > 0
