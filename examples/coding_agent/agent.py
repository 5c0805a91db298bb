"""Claude Code on a small repair, and the two functions that tune its model.

Role: what an owner brings. Claude Code is the program that its registry has, unchanged: it is started in a copy of the
folder to mend, and finds URL, key and name of the rollout's model in its environment.
In: a task `{"folder": ..., "question": ..., "check": ...}` and a model object (`run`). Out: a `WorkflowOutput` with
what it printed and reward 1 if the check, a shell command, succeeds in the folder that it left, else 0.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from sharpen import WorkflowOutput

REPAIRS = Path(__file__).resolve().parent / "repairs"
SYSTEM = "You mend files in the current folder with Bash."
CLAUDE = os.environ.get("CLAUDE", "claude")
"""The program: `npm install -g @anthropic-ai/claude-code`, or its path in the variable CLAUDE."""

SAME_BEGINNING = {"CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
"""Else the prompt begins with a line made from the question, and prompts of different tasks share nothing."""


def command(question: str) -> list[str]:
    """Claude Code with one tool and a system prompt of our own: 1,000 tokens. Without the last four words: 17,000."""
    program = shutil.which(CLAUDE)
    if program is None:
        raise SystemExit(f"there is no program {CLAUDE!r}: npm install -g @anthropic-ai/claude-code, or set CLAUDE")
    return [program, "-p", question, "--allowedTools", "Bash", "--tools", "Bash", "--system-prompt", SYSTEM]


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: one run of Claude Code in a copy of the task's folder, and the check of what it left."""
    ended = await model.run(
        command(task["question"]), folder=REPAIRS / task["folder"], env=SAME_BEGINNING, timeout_s=300
    )
    checked = await model.run(["sh", "-c", task["check"]], folder=ended.folder, timeout_s=120)
    return WorkflowOutput(
        response=ended.stdout,
        reward=float(checked.exit_code == 0),
        metrics={"exit_code": float(ended.exit_code), "seconds": ended.seconds},
    )
