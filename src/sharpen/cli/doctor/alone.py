"""Runs a check of `sharpen doctor` in a process of its own.

In: a command that prints JSON as its last line. Out: that, or a `Finding` that says how it failed.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from sharpen.cli.doctor.checks import Finding


def run_alone(command: Sequence[str], name: str, what: str, timeout_s: float) -> Finding | dict[str, Any]:
    """Run a command. `name` and `what` say in a finding what was being done."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Finding(
            name=name,
            state="problem",
            what=f"{what} did not end within {timeout_s:.0f} s",
            todo="is the machine busy? try again",
        )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        todo = f"run `{shlex.join(command)}` to see all of it"
        return Finding(name=name, state="problem", what=f"{what} failed: {reason}", todo=todo)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
