"""Agents that do what they can to their process. Workers import this module, so it imports little."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from sharpen.config.public import JudgeOutput, WorkflowOutput
from sharpen.errors import DatasetError

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


async def asks(task: Any, model: Any) -> WorkflowOutput:
    """Ask twice, through both clients, and say in which process."""
    first = await model.client.chat.completions.create(model=model.name, messages=QUESTION)
    text = first.choices[0].message.content
    messages = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
    ask = model.sync_client.chat.completions.create
    second = await asyncio.to_thread(ask, model=model.name, messages=messages)
    known = {
        "process": os.getpid(),
        "torch": "torch" in sys.modules,
        "calls": len(model.calls()),
        "prompt": "2 + 2" in model.prompt_text(0),
        "tokens": await model.count_tokens(QUESTION),
        "version": model.version,
    }
    return WorkflowOutput(response=second.choices[0].message.content, metrics=known)


async def judged(task: Any, response: Any) -> JudgeOutput:
    return JudgeOutput(reward=float(response == "four"), metrics={"process": os.getpid()})


def leave() -> None:
    os._exit(0)


def crash() -> None:
    ctypes.string_at(0)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill() -> None:
    """Take memory until that is refused, and go on."""
    kept = []
    while True:
        kept.append(bytearray(1 << 24))


class _Unnamed(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise NothingLeft


class NothingLeft(MemoryError, metaclass=_Unnamed):
    """Cannot be described either, as where so little memory is left that reading the error takes more of it."""


def use_up() -> None:
    raise NothingLeft


class OnlyHere(DatasetError):
    """Can be read in the process that made it alone."""

    def __reduce__(self) -> Any:
        return only_in, (os.getpid(),)


def only_in(process: int) -> OnlyHere:
    if process != os.getpid():
        raise RuntimeError("not in this process")
    return OnlyHere("here")


def hide_away() -> None:
    raise OnlyHere("here")


def log_line() -> None:
    logging.getLogger("mine").warning("hello")


DEEDS = {
    "leave": leave,
    "crash": crash,
    "kill": kill,
    "fill": fill,
    "use up": use_up,
    "hide": hide_away,
    "log": log_line,
}


async def does(task: Any, model: Any) -> float:
    """Ask once, without a client that takes long to import, and do what the task says."""
    body = json.dumps({"model": model.name, "messages": QUESTION}).encode()
    headers = {"authorization": f"Bearer {model.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{model.base_url}/chat/completions", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        answer.read()
    if task["deed"] in DEEDS:
        DEEDS[task["deed"]]()
    return 1.0


async def holds(task: Any, model: Any) -> float:
    """Hold the interpreter's lock, in C, for ever: no thread of the process runs any more."""
    ctypes.PyDLL(None).sleep(3600)
    return 1.0


async def swallows(task: Any, model: Any) -> float:
    """Say in which process this is. Then leave a forked child that lives on, and ignore every cancellation, unless the
    task asks for no more."""
    child = os.fork() if task["goes_on"] else os.getpid()
    if child == 0:
        time.sleep(3600)
        os._exit(0)
    Path(task["file"]).write_text(f"{os.getpid()} {child}")
    while task["goes_on"]:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
    return 1.0


async def returns_twice(task: Any, model: Any) -> float:
    """Fork, and return in both processes."""
    os.fork()
    return 1.0


async def writes(task: Any, model: Any) -> float:
    print("one line")
    os.write(1, b"x" * 3_000_000)
    return 1.0


async def needs_answer(task: Any, model: Any) -> float:
    return float(task["answer"])


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


async def raises_strangely(task: Any, model: Any) -> float:
    raise Unpicklable("as I like")
