"""Trinity's agents that do mathematics with Python as their tool: AgentScope's `ReActAgent` with `execute_python_code`.

In: a task with a question and a truth. Out: the experiences of all the agent's calls, with the reward of its answer and
the metric `react_memory_length`. The code that the model writes is run on this machine, in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.react import (
    GSM8K_PROMPT,
    BoxedResult,
    agentscope,
    react_agent,
    said,
    sampling_of,
    user_message,
)
from sharpen.compat.trinity.rewards import MathBoxedRewardFn, truth_in
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import Workflow

# A tool that runs the Python code that a model writes: in a process of its own, on this machine.
#
# In: code, and a time limit. Out: return code and what was printed, in the form of AgentScope's tool of that name.
# Unlike with AgentScope's, the process ends with the rollout that started it, and may print more than a pipe holds.

LIMIT_S = 300.0
MOST_BYTES = 200_000
"""Of each output. A program that prints more is ended: no context holds it."""
POLLED_EVERY_S = 0.02


async def execute_python_code(code: str, timeout: float = LIMIT_S) -> Any:
    """Execute Python code in a file of its own. Returns the return code, the standard output and the standard error;
    only what the code prints can be seen.

    Args:
        code (str):
            The Python code.
        timeout (float, defaults to 300):
            Seconds that it may take.
    """
    text = await run_python(code, min(float(timeout), LIMIT_S))
    block = agentscope("message", "TextBlock")(type="text", text=text)
    return agentscope("tool", "ToolResponse")(content=[block])


async def run_python(code: str, limit_s: float) -> str:
    """What came of the code: `<returncode>`, `<stdout>`, `<stderr>`."""
    with tempfile.TemporaryDirectory() as folder:
        program, printed = Path(folder, "code.py"), [Path(folder, "stdout"), Path(folder, "stderr")]
        program.write_text(code, encoding="utf-8")
        with printed[0].open("wb") as stdout, printed[1].open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-u", str(program)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONUTF8": "1"},
                start_new_session=True,
            )
        try:
            remark = await _ended(process, printed, time.monotonic() + limit_s)
        finally:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # all of its group: it may have started others
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = [_beginning(path) for path in printed]
    returncode, said = (-1, f"{texts[1]}\n{remark}".strip()) if remark else (process.returncode, texts[1])
    return f"<returncode>{returncode}</returncode><stdout>{texts[0]}</stdout><stderr>{said}</stderr>"


async def _ended(process: subprocess.Popen[bytes], printed: Sequence[Path], deadline: float) -> str | None:
    """Wait for the end of a process; why it must be ended, if it must."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return "TimeoutError: the code took longer than it may."
        if any(path.stat().st_size > MOST_BYTES for path in printed):
            return f"It was ended: it printed more than {MOST_BYTES} bytes."
        await asyncio.sleep(POLLED_EVERY_S)
    return None


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MOST_BYTES).decode(errors="replace")


class AgentScopeReactMathWorkflow(Workflow):
    """The answer is the agent's structured `result`, scored by its box."""

    is_async = True
    max_iters = 10

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.query = task.raw_task[task.format_args.prompt_key]
        self.truth = truth_in(task.truth)
        self.reward_fn = MathBoxedRewardFn()
        toolkit = agentscope("tool", "Toolkit")()
        toolkit.register_tool_function(execute_python_code)
        self.agent = react_agent(
            "math_react_agent",
            GSM8K_PROMPT,
            client=model.get_openai_async_client(),
            model_name=model.model_path,
            sampling=sampling_of(task),
            toolkit=toolkit,
            max_iters=self.max_iters,
        )

    async def run_async(self) -> list[Experience]:
        """Solve, score, and give every call of the agent the reward."""
        answer = await self.answer(user_message(self.query))
        reward = sum(self.reward_fn(response=said(answer), truth=self.truth).values())
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = reward
            experience.metrics["react_memory_length"] = len(self.agent.memory.content)
        return experiences

    async def answer(self, question: Any) -> Any:
        """The agent's message."""
        return await self.agent.reply(question, structured_model=BoxedResult)


class AgentScopeV0ReactMathWorkflow(AgentScopeReactMathWorkflow):
    """As written for AgentScope 0.x: at most five rounds, and the answer is the text that the agent ends with.

    The agent is that of AgentScope 1.x.
    """

    max_iters = 5

    async def answer(self, question: Any) -> Any:
        """The agent's message."""
        return await self.agent.reply(question)
