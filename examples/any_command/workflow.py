"""The workflow of an agent that is a command: it runs on one task in a folder of its own.

Role: what an owner brings beside the command itself, `agent.sh`. The quickstart's judge compares numbers.
In: a task `{"question": ..., "answer": "... #### 42"}` and a model object (`run`). Out: a `WorkflowOutput` with the
text that the agent wrote into the file `answer`.
"""

from pathlib import Path
from typing import Any

from sharpen import WorkflowOutput

SCRIPT = Path(__file__).with_name("agent.sh")
TIME_LIMIT_S = 60.0


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """One run of the command on one task; an agent that never answers, or takes too long, has an empty response."""
    result = await model.run(["sh", SCRIPT], files={"question": task["question"]}, timeout_s=TIME_LIMIT_S)
    if result.exit_code != 0 and not result.timed_out:
        raise RuntimeError(f"agent.sh ended with {result.exit_code}: {result.stderr}")
    answer = result.read_text("answer") if "answer" in result.created else ""
    return WorkflowOutput(response=answer, metrics={"agent_seconds": result.seconds})
