"""Workflows and tasks of the tests with Ray; rollout workers import them from here. And their processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import uuid
from pathlib import Path
from typing import Any

import psutil

from sharpen import UnusableAnswerError, WorkflowOutput
from sharpen.errors import DatasetError
from sharpen.types import Task


def actors_of(kind: str) -> list[psutil.Process]:
    """Processes of this session's own cluster in which such an actor lives."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if f"ray::{kind}" in " ".join(process.cmdline()):
                found.append(process)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether nothing of it runs any more."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def make_tasks(count: int, do: str = "twice") -> list[Task]:
    rows = [{"question": f"question {i}", "number": i, "do": do} for i in range(count)]
    return [Task(id=f"train/{i}", index=i, row=row) for i, row in enumerate(rows)]


async def ask(model: Any, text: str, **sampling: Any) -> str:
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": text}], **{"max_tokens": 8, **sampling}
    )
    return reply.choices[0].message.content or ""


async def prefers_letter(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """One call; the reward is the share of the letter 'e' in the answer."""
    text = await ask(model, task["question"])
    return WorkflowOutput(reward=text.count("e") / 8, metrics={"pid": float(os.getpid())})


async def looks_at_a_picture(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Shows the picture of the task twice, in a conversation that goes on; the reward is the share of vowels."""
    part = {"type": "image_url", "image_url": {"url": task["picture"]}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    said = ""
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
        answer = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": [part]}]
        said += answer
    return WorkflowOutput(reward=sum(letter in "aeiou" for letter in said) / 12)


async def waits_at_a_gate(task: dict[str, Any], model: Any, workflow_args: dict[str, Any]) -> WorkflowOutput:
    """The same, but rollouts of a version say in the folder `gate` that they are there, and wait for a file `open`."""
    folder = Path(workflow_args["gate"])
    if model.version == workflow_args["version"] and not (folder / "open").exists():
        (folder / f"waiting-{uuid.uuid4()}").touch()
        while not (folder / "open").exists():
            await asyncio.sleep(0.02)
    return await prefers_letter(task, model)


async def does_what_the_task_says(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """`task["do"]`, one of the functions below."""
    await ACTS[task["do"]](task, model)
    return WorkflowOutput(reward=float(task["number"]), metrics={"pid": float(os.getpid())})


async def ask_twice(task: dict[str, Any], model: Any) -> None:
    """Two calls that hold the task's question, with a pause between them."""
    await ask(model, f"first {task['question']}")
    await asyncio.sleep(0.001 * (task["number"] % 7))
    await ask(model, f"second {task['question']}")


async def ask_slowly(task: dict[str, Any], model: Any) -> None:
    """Ten calls, one after the other."""
    for turn in range(10):
        await ask(model, f"{turn} {task['question']}")
        await asyncio.sleep(0.05)


async def crash(task: dict[str, Any], model: Any) -> None:
    """Task 3 ends its process; the others take a while, so that they are there when it does."""
    await ask(model, task["question"])
    await asyncio.sleep(0.3)
    if task["number"] == 3:
        os._exit(7)


async def hang(task: dict[str, Any], model: Any) -> None:
    """Hold the interpreter for ever: no signal and no other thread gets through."""
    re.match(r"(a+)+$", "a" * 60 + "b")


class NoFieldError(KeyError):
    """What the agent raises on an answer that it cannot read."""


async def fail_on_the_answer(task: dict[str, Any], model: Any) -> None:
    """By task: ours, one that the settings name, one that nobody named."""
    await ask(model, task["question"], max_tokens=100, stop=list("aeio"))  # not cut: that would be another cause
    raise [UnusableAnswerError("no JSON"), NoFieldError("x"), RuntimeError("down")][task["number"]]


async def find_bad_input(task: dict[str, Any], model: Any) -> None:
    raise DatasetError(f"task {task['number']} has nothing")


async def ask_for_a_stream(task: dict[str, Any], model: Any) -> None:
    """One streamed call: its chunks come one by one, and its text is that of the recorded ids."""
    messages: Any = [{"role": "user", "content": task["question"]}]
    stream = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    (call,) = model.calls()
    assert "".join(texts) == call.response["content"]


ACTS = {
    "twice": ask_twice,
    "slowly": ask_slowly,
    "streamed": ask_for_a_stream,
    "crash": crash,
    "hang": hang,
    "fail": fail_on_the_answer,
    "bad input": find_bad_input,
}
