"""An agent that answers questions from an inbox, and a judge that is a model with a rubric.

Role: what an owner brings. `answer_question` is the agent in the plain `openai` SDK and knows nothing of training;
`run_agent` (the workflow) lets it work on one question; `judge` asks the auxiliary model named `judge`.
In: a task `{"question": ..., "answer": ..., "email_id": 17}`, a model object, `workflow_args` with the `database`.
Out: a `WorkflowOutput` with the answer and the emails that were read, a `JudgeOutput` with a reward from 0 to 1.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from email_search.inbox import tool_schemas, use_tool
from openai import AsyncOpenAI
from parts.model_judge import ask_judge

from sharpen import JudgeOutput, WorkflowOutput

SYSTEM = (
    "You answer Robin's questions from the inbox. Search it, read the emails that matter (the newest counts), then "
    "answer in one short sentence. If the inbox does not say, say so."
)
MAX_CALLS = 8
RUBRIC = {
    "correct": "does the given answer state the same fact as the true answer, and no other one instead of it?",
    "brief": "is the given answer at most two sentences, without anything that was not asked?",
}
BRIEF_SHARE = 0.2
"""Part of the reward of a correct answer that it only gets when it is brief."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the agent said (empty when it never answered), the ids of the emails it read, and its tool calls."""

    text: str
    read: tuple[int, ...]
    num_tool_calls: int


async def answer_question(client: AsyncOpenAI, model: str, question: str, database: Path) -> Answer:
    """Let the model use the tools until it answers."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    read: list[int] = []
    num_tool_calls = 0
    for _ in range(MAX_CALLS):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=tool_schemas())
        message = reply.choices[0].message
        if not message.tool_calls:
            return Answer(text=(message.content or "").strip(), read=tuple(read), num_tool_calls=num_tool_calls)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            name, arguments = call.function.name, call.function.arguments
            result = await asyncio.to_thread(use_tool, database, name, arguments)
            num_tool_calls += 1
            if name == "read_email" and not result.startswith("error:"):
                read.append(json.loads(arguments)["id"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return Answer(text="", read=tuple(read), num_tool_calls=num_tool_calls)


async def run_agent(task: dict[str, Any], model: Any, workflow_args: Mapping[str, Any]) -> WorkflowOutput:
    """The workflow: one run of the agent on one question."""
    answer = await answer_question(model.client, model.name, task["question"], Path(workflow_args["database"]))
    return WorkflowOutput(
        response=answer.text,
        metrics={
            "answered": answer.text != "",
            "tool_calls": answer.num_tool_calls,
            "read_the_right_email": task["email_id"] in answer.read,
        },
    )


async def judge(task: dict[str, Any], response: Any, auxiliary_models: dict[str, Any]) -> JudgeOutput:
    """0 for a wrong answer or none; 0.8 for a correct one, 1 for one that is brief too."""
    if not response:
        return JudgeOutput(reward=0.0, metrics={"correct": 0.0, "brief": 0.0})
    case = {"question": task["question"], "true_answer": task["answer"], "given_answer": response}
    verdict = await ask_judge(auxiliary_models["judge"], RUBRIC, case)
    reward = verdict["correct"] * (1.0 - BRIEF_SHARE * (not verdict["brief"]))
    return JudgeOutput(reward=reward, metrics={name: float(decision) for name, decision in verdict.items()})
