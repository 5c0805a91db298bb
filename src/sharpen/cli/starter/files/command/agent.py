"""The workflow of an agent that is a command: `program.py` is started for each task, in a folder of its own.

Put your command in its place; it may be a program in any language that finds its model by OPENAI_BASE_URL,
OPENAI_API_KEY and OPENAI_MODEL (or Anthropic's variables).
"""

import sys
from pathlib import Path
from typing import Any

from sharpen import WorkflowOutput

PROGRAM = Path(__file__).with_name("program.py")
TIME_LIMIT_S = 60.0


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Run the command on one task: its input is a file, its answer what it prints. A crash is a failure of the
    rollout, not a wrong answer; a command that takes too long has not answered."""
    result = await model.run(
        [sys.executable, PROGRAM, "question.txt"], files={"question.txt": task["question"]}, timeout_s=TIME_LIMIT_S
    )
    if result.exit_code != 0 and not result.timed_out:
        raise RuntimeError(f"{PROGRAM.name} ended with {result.exit_code}: {result.stderr}")
    return WorkflowOutput(response=result.stdout)
