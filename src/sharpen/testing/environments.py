"""Tries an environment: its tasks, and one attempt of each split with a model whose replies are given.

In: what opens it, its settings, replies. Out: nothing, or an `AssertionError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from sharpen.agent.environments.environment import TEST, TRAIN, Environment, OpenEnvironment
from sharpen.agent.rollout.rewards import as_number
from sharpen.agent.rollout.signature import judge_arguments, workflow_arguments
from sharpen.config.public import EnvironmentConfig

_SPLITS = (TRAIN, TEST)


def check_environment(make: OpenEnvironment, config: EnvironmentConfig, replies: Sequence[str] = ("",)) -> None:
    """Raise `AssertionError` if what `make` opens does not keep the contract of `Environment`.

    It is opened twice: both must give the same rows, of values that JSON has, as few as the settings ask for, none in
    both splits. Then the first task of each split is attempted with a model that says `replies`, one after the other
    and the last one again and again: it must be asked, the attempt must end within a minute, and give a reward that is
    a number, or a response that the judge gives one.
    """
    first, second = make(config), make(config)
    workflow_arguments(first.workflow)
    if first.judge is not None:
        judge_arguments(first.judge)
    texts = {split: _texts(first, split) for split in _SPLITS}
    for split, limit in zip(_SPLITS, (config.train_tasks, config.held_out_tasks), strict=True):
        number = len(texts[split])
        assert number, f"there are no tasks of split {split!r}"
        assert limit is None or number <= limit, f"{limit} tasks of {split!r} were asked for, and there are {number}"
        again = _texts(second, split)
        assert texts[split] == again, f"opened again with the same settings, it has other tasks of split {split!r}"
    both = set(texts[TRAIN]) & set(texts[TEST])
    assert not both, f"a task is in both splits: {min(both)}"
    for split in _SPLITS:
        asyncio.run(_attempt(first, first.tasks(split)[0], replies, split))
    for environment in (first, first, second):
        environment.close()


def _texts(environment: Environment, split: str) -> list[str]:
    return [_text(row, at, split) for at, row in enumerate(environment.tasks(split))]


def _text(row: Any, at: int, split: str) -> str:
    assert isinstance(row, Mapping), f"row {at} of {split!r} is a {type(row).__name__}, not a mapping"
    wrong = [key for key in row if not isinstance(key, str)]
    assert not wrong, f"row {at} of {split!r} has the field {wrong[0]!r}: names of fields are text"
    try:
        return json.dumps(dict(row), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"row {at} of {split!r} holds what JSON does not: {error}") from error


async def _attempt(environment: Environment, row: Mapping[str, Any], replies: Sequence[str], split: str) -> None:
    task = copy.deepcopy(dict(row))
    with served_replies(replies) as (model, requests):
        async with asyncio.timeout(60), model.client:
            output = await environment.workflow(task=task, model=model)
    assert requests, f"the attempt at a task of {split!r} asked the model nothing"
    reward = getattr(output, "reward", output)
    if environment.judge is None:
        assert reward is not None, f"the attempt at a task of {split!r} gave no reward, and there is no judge"
    else:
        judged = environment.judge(task=task, response=getattr(output, "response", None))
        assert inspect.isawaitable(judged), "the judge is not async"
        verdict = await judged
        reward = getattr(verdict, "reward", verdict)
    number = as_number(reward)
    is_number = number is not None and math.isfinite(number)
    assert is_number, f"the reward of a task of {split!r} is {reward!r}, not a finite number"


@contextlib.contextmanager
def served_replies(replies: Sequence[str | Mapping[str, Any]]) -> Iterator[tuple[Any, list[Any]]]:
    """Serve a model that says the replies: texts, or what a message has beside its role. Yields the model and
    the requests that it gets."""
    import openai

    requests: list[Any] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            body = json.dumps(_completion(replies[min(len(requests), len(replies)) - 1])).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    try:
        yield SimpleNamespace(client=client, name="scripted", base_url=url, api_key="none"), requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _completion(said: str | Mapping[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [choice],
        "usage": usage,
    }
