"""An agent that is as good as its prompt says, tasks for it, and a model that proposes prompts by script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import dspy
from dspy.lm15 import Message, Response, TextPart, Usage

from sharpen import DatasetConfig, JudgeOutput, WorkflowOutput

INITIAL = "You are of level 3."


class Proposer:
    """An engine for `dspy.LM` that proposes levels, one after the other, in the form that it is asked for."""

    def __init__(self, levels: list[int]) -> None:
        self.levels = levels
        self.asked: list[str] = []
        self.fails = False

    def complete(self, request: Any) -> Response:
        text = "\n".join([str(request.system or ""), *(message.text or "" for message in request.messages)])
        self.asked.append(text)
        if self.fails:
            raise ConnectionError("the proposing model is away")
        fields = re.findall(r"\[\[ ## (\w+) ## \]\]", text)
        if "proposed_instruction" in fields:
            answer = self._field("proposed_instruction", self._next())
        elif "summary" in fields:
            answer = self._field("summary", "sums")
        elif "observations" in fields:
            answer = self._field("observations", "COMPLETE")
        else:  # GEPA's reflection
            answer = f"```\n{self._next()}\n```"
        usage = Usage(input_tokens=0, output_tokens=0, total_tokens=0)
        message = Message.assistant([TextPart(answer)])
        return Response(id=None, model="scripted", message=message, finish_reason="stop", usage=usage)

    def _next(self) -> str:
        self.levels = [*self.levels[1:], self.levels[0]]
        return f"You are of level {self.levels[-1]}."

    def _field(self, name: str, value: str) -> str:
        return f"[[ ## {name} ## ]]\n{value}\n\n[[ ## completed ## ]]"


def scripted(*levels: int) -> tuple[Any, Proposer]:
    """A `dspy.LM` that proposes these levels, and its engine."""
    engine = Proposer(list(levels))
    return dspy.LM("openai/scripted", engine=engine, cache=False), engine


def write(path: Path, numbers: range) -> DatasetConfig:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1), "n": n} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(path))


def level_of(system_prompt: str) -> int:
    return int(re.findall(r"level (\d+)", system_prompt)[0])


async def workflow(task: Any, system_prompt: str) -> WorkflowOutput:
    """Right on as many tasks of ten as the prompt's level says."""
    right = task["n"] % 10 < level_of(system_prompt)
    return WorkflowOutput(response=task["answer"] if right else "?")


async def judge(task: Any, response: Any) -> JudgeOutput:
    right = response == task["answer"]
    return JudgeOutput(reward=float(right), metrics={"note": "well done" if right else "not a number"})
