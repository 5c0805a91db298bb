"""Three agents against a scripted model, recorded as a run is: one call; two calls with a tool between; a conversation
that goes on from its first answer in two ways, after an example in the prompt, with an image.

In: the fixture `rollouts`. Out: a folder with a `run.db`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sharpen import WorkflowOutput
from sharpen.learning.experience.journal import Journal
from sharpen.types import Group

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a":  2, "b": 2}}\n</tool_call>'
QUESTIONS = ("2 + 2?", "3 + 1?")


def said(prompt: str) -> str:
    """What the model says, by what it was asked last."""
    if "<tool_response>" in prompt:
        return "It is 4."
    if "Add two numbers" in prompt:
        return CALL
    return "left" if prompt.rindex("left") > prompt.rindex("first") else "right" if "right" in prompt else "first"


async def ask(model: Any, messages: list[Any], **options: Any) -> Any:
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=200, **options)
    return reply.choices[0].message


async def one_call(task: dict[str, Any], model: Any) -> WorkflowOutput:
    answer = await ask(model, [{"role": "user", "content": f"first or left? {task['question']} first"}])
    return WorkflowOutput(response=answer.content, reward=float(task["question"] == QUESTIONS[0]))


async def with_a_tool(task: dict[str, Any], model: Any) -> WorkflowOutput:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task["question"]}]
    message = await ask(model, messages, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
    answer = await ask(model, [*messages, message.model_dump(exclude_none=True), result], tools=[TOOL])
    return WorkflowOutput(response=answer.content, reward=1.0)


async def forked(task: dict[str, Any], model: Any) -> WorkflowOutput:
    example = [{"role": "user", "content": "an example left"}, {"role": "assistant", "content": "as this"}]
    begin = [*example, {"role": "user", "content": f"{task['question']} first"}]
    first = await ask(model, begin)
    for way in ("left", "right left first"):
        answered = [*begin, {"role": "assistant", "content": first.content}]
        last = await ask(model, [*answered, {"role": "user", "content": way}])
    return WorkflowOutput(response=last.content, reward=0.5)


def run_of(rollouts: Any, folder: Path) -> Path:
    """A run's folder with what the three agents did, each on two tasks."""
    folder.mkdir()
    with Journal(folder / "run.db") as journal:
        for place, workflow in enumerate((one_call, with_a_tool, forked)):
            rows = [{"question": question} for question in QUESTIONS]
            groups: list[Group] = rollouts(said).run(workflow, tasks=rows, group_size=1)
            for group in groups:
                assert [one.error for one in group.rollouts] == [None]
                journal.add(renamed(group, f"step_{place + 1}"))
    return folder


def renamed(group: Group, step: str) -> Group:
    id_ = group.id.replace("step-0", step)
    members = (replace(one, id=one.id.replace("step-0", step), group_id=id_) for one in group.rollouts)
    return replace(group, id=id_, rollouts=tuple(members))
