"""Clients set where all rollouts find them: a call from within another rollout fails both, and none is trained.

The rollouts of different tasks run at the same time, over a scripted engine. Red when `gateway.caller.foreign_use`
returns None (numbers in `test_no_call_of_another_rollout_is_trained`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import threading
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
from fake_endpoint import FakeEndpoint
from scripted import ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import InProcess
from sharpen.agent.rollout.models import RolloutModels
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.agent.rollout.user_loop import owner
from sharpen.config.run import RolloutConfig
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.meter import Meter, Tally
from sharpen.placement.auxiliary.remote import RemoteModel
from sharpen.types import CallStatus, Group, Outcome, Rollout, Task

TASKS, GROUP_SIZE, TURNS = 12, 4, 3
Workflow = Callable[..., Any]


@contextmanager
def serving() -> Iterator[Gateway]:
    loop, tokenizer = ServingLoop(), toy_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda request: "yes")
    gateway = Gateway(engine, tokenizer, model_name="toy", loop=loop.loop, who_calls=owner.get)
    yield gateway
    loop.run(gateway.close())
    loop.stop()


def roll_out(
    open_session: Any, workflow: Workflow, num_tasks: int = TASKS, group_size: int = GROUP_SIZE, **settings: Any
) -> list[Group]:
    """A group for each task, all at once."""
    config = RolloutConfig(**{"max_attempts": 1, "timeout_s": 60.0, **settings})
    tasks = [Task(id=f"t/{number}", index=number, row={"name": f"task {number}"}) for number in range(num_tasks)]
    attempts = InProcess(UserFunctions(workflow, None), config.timeout_s)
    with RolloutRunner(attempts, open_session, config, group_size, 0) as runner:
        return runner.run(tasks, group_ids=[f"s/{task.id}" for task in tasks])


def sessions_of(gateway: Gateway) -> Any:
    def open_session(rollout_id: str, noise_seed: int) -> RolloutModels:
        return RolloutModels(gateway.open(rollout_id, noise_seed))

    return open_session


def task_of(call: Any) -> str:
    return re.findall(r"task \d+", call.messages[0]["content"])[0]


def trained(groups: list[Group]) -> tuple[int, int]:
    """Calls that would be trained, and those of them that belong to another task."""
    calls = [
        (group.task.row["name"], call)
        for group in groups
        for rollout in group.scored
        for call in rollout.calls
        if call.trainable
    ]
    return len(calls), sum(task_of(call) != name for name, call in calls)


def rollouts(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def first_message(task: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": f"this is {task['name']}"}]}


default: dict[str, Any] = {}
"""What a framework keeps for the whole process."""


pool: dict[str, Any] = {}


def over_http(**settings: Any) -> openai.AsyncOpenAI:
    """A client that reads no certificates, which takes 50 ms."""
    http: Any = httpx.AsyncClient(verify=False)
    return openai.AsyncOpenAI(max_retries=0, http_client=http, **settings)


async def by_client(task: Any, model: Any) -> float:
    default["client"] = model.client
    for _ in range(TURNS):
        await asyncio.sleep(0.001)
        await default["client"].chat.completions.create(**first_message(task))
    return 1.0


async def by_client_in_tasks(task: Any, model: Any) -> float:
    """In tasks that the agent spawns, which inherit their context."""
    default["client"] = model.client

    async def step() -> None:
        await asyncio.sleep(0.001)
        await default["client"].chat.completions.create(**first_message(task))

    for _ in range(TURNS):
        await asyncio.create_task(step())
    return 1.0


async def by_blocking_client(task: Any, model: Any) -> float:
    """In threads that inherit their context, as those of `asyncio.to_thread` do."""
    default["client"] = model.sync_client
    for _ in range(TURNS):
        await asyncio.sleep(0.001)
        await asyncio.to_thread(lambda: default["client"].chat.completions.create(**first_message(task)))
    return 1.0


async def by_environment(task: Any, model: Any) -> float:
    """Over HTTP, with a client that the agent makes anew for each call."""
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = model.base_url, model.api_key
    for _ in range(TURNS):
        await asyncio.sleep(0.001)
        async with over_http() as client:
            await client.chat.completions.create(**first_message(task))
    return 1.0


async def by_settings(task: Any, model: Any) -> float:
    """Over HTTP, with one client whose connections stay open for the next call, whosever it is."""
    default["client"] = over_http(base_url=model.base_url, api_key=model.api_key)
    for _ in range(TURNS):
        await asyncio.sleep(0.001)
        await default["client"].chat.completions.create(**first_message(task))
    return 1.0


async def by_plain_http(task: Any, model: Any) -> float:
    """Over HTTP, by the standard library, in threads that inherit their context. A header says that it comes from
    another machine: red when uvicorn's `proxy_headers` is on, which believes it."""
    default["url"], default["key"] = model.base_url, model.api_key

    def ask() -> None:
        request = urllib.request.Request(
            f"{default['url']}/chat/completions",
            json.dumps(first_message(task)).encode(),
            {"Authorization": f"bearer {default['key']}", "X-Forwarded-For": "192.0.2.7"},
        )
        urllib.request.urlopen(request).read()

    for _ in range(TURNS):
        await asyncio.sleep(0.001)
        await asyncio.to_thread(ask)
    return 1.0


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
    before = {name: os.environ.pop(name, None) for name in names}
    yield
    default.clear()
    pool.clear()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
    for name in names:
        os.environ.pop(name, None)
        if before[name] is not None:
            os.environ[name] = str(before[name])


GLOBAL = [by_client, by_client_in_tasks, by_blocking_client, by_environment, by_settings, by_plain_http]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # clients that are not closed, as programs leave them
@pytest.mark.parametrize("workflow", GLOBAL)
def test_no_call_of_another_rollout_is_trained(workflow: Workflow) -> None:
    with serving() as gateway:
        groups = roll_out(sessions_of(gateway), workflow)
    count, wrong = trained(groups)
    assert wrong == 0
    assert count < TASKS * GROUP_SIZE * TURNS / 4
    failed = [rollout for rollout in rollouts(groups) if rollout.outcome != Outcome.OK]
    assert {rollout.outcome for rollout in failed} == {Outcome.WORKFLOW_ERROR}
    for rollout in failed:
        assert rollout.error is not None
        named = re.findall(r"rollout (s/\S+?)[ :]", rollout.error)
        assert len({*named, rollout.id}) == len(set(named)) == 2, rollout.error
        assert "`model` that its own workflow received" in rollout.error
    foreign = [(one, call) for one in rollouts(groups) for call in one.calls if call.status == CallStatus.FOREIGN]
    assert foreign
    for rollout, call in foreign:
        assert not call.trainable
        assert len(call.sampled_ids_S) == 0
        assert rollout.outcome == Outcome.WORKFLOW_ERROR


async def swallows(task: Any, model: Any) -> float:
    """An agent that takes every error for an empty answer."""
    default.setdefault("client", model.client)
    default.setdefault("event", asyncio.Event())
    try:
        await default["client"].chat.completions.create(**first_message(task))
    except openai.PermissionDeniedError:
        default["event"].set()
    await default["event"].wait()
    return 1.0


def test_both_rollouts_fail_also_where_the_refusal_is_swallowed() -> None:
    """Red when `InProcess` does not look at `Run.misuse`."""
    with serving() as gateway:
        groups = roll_out(sessions_of(gateway), swallows, num_tasks=2)
    assert {rollout.outcome for rollout in rollouts(groups)} == {Outcome.WORKFLOW_ERROR}
    assert trained(groups) == (0, 0)


async def one_after_the_other(task: Any, model: Any) -> float:
    """The second rollout's call would go through the connection that the first one opened for its own."""
    if first := "client" not in default:
        default["client"] = over_http(base_url=model.base_url, api_key=model.api_key)
        default["asked"], default["ended"] = asyncio.Event(), asyncio.Event()
    else:
        await default["asked"].wait()
    with suppress(openai.PermissionDeniedError):
        await default["client"].chat.completions.create(**first_message(task))
    default["asked" if first else "ended"].set()
    await default["ended"].wait()
    return 1.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_connection_that_was_opened_for_one_rollout_hides_no_other() -> None:
    """Red when the server leaves connections open whose opener is known."""
    with serving() as gateway:
        groups = roll_out(sessions_of(gateway), one_after_the_other, num_tasks=1, group_size=2)
    assert {rollout.outcome for rollout in rollouts(groups)} == {Outcome.WORKFLOW_ERROR}


def test_the_key_of_a_rollout_that_has_ended_fails_who_uses_it() -> None:
    async def keeps_the_first(task: Any, model: Any) -> float:
        client = default.setdefault("client", model.client)
        with suppress(openai.AuthenticationError):
            await client.chat.completions.create(**first_message(task))
        return 1.0

    with serving() as gateway:
        groups = roll_out(sessions_of(gateway), keeps_the_first, max_concurrent_rollouts=1)
    first, *others = rollouts(groups)
    assert first.outcome == Outcome.OK
    assert len(first.calls) == 1
    assert {rollout.outcome for rollout in others} == {Outcome.WORKFLOW_ERROR}
    assert all(rollout.error is not None and f"{first.id} has ended" in rollout.error for rollout in others)


async def with_a_shared_pool(task: Any, model: Any) -> float:
    """Connections may be shared: each call has the key of its own rollout."""
    if not pool:
        pool["http"] = httpx.AsyncClient(verify=False)
    http = pool["http"]
    client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0, http_client=http)
    for _ in range(TURNS):
        await asyncio.sleep(0.001)
        await client.chat.completions.create(**first_message(task))
    return 1.0


async def with_its_own(task: Any, model: Any) -> float:
    await model.client.chat.completions.create(**first_message(task))
    await asyncio.to_thread(lambda: model.sync_client.chat.completions.create(**first_message(task)))
    thread = threading.Thread(target=lambda: model.sync_client.chat.completions.create(**first_message(task)))
    thread.start()
    await asyncio.to_thread(thread.join)
    return 1.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("workflow", [with_a_shared_pool, with_its_own])
def test_rollouts_that_use_their_own_model_are_left_alone(workflow: Workflow) -> None:
    with serving() as gateway:
        groups = roll_out(sessions_of(gateway), workflow)
    assert trained(groups) == (TASKS * GROUP_SIZE * TURNS, 0)


def test_what_a_plain_thread_does_is_not_known() -> None:
    """Python's threads do not inherit a context: nothing is claimed, and docs/use/agentscope.md says so."""

    async def by_thread(task: Any, model: Any) -> float:
        client = default.setdefault("client", model.sync_client)
        thread = threading.Thread(target=lambda: client.chat.completions.create(**first_message(task)))
        thread.start()
        await asyncio.to_thread(thread.join)
        default["event"] = default.get("event", 0) + 1
        while default["event"] < 2 * GROUP_SIZE:
            await asyncio.sleep(0.001)
        return 1.0

    with serving() as gateway:
        groups = roll_out(sessions_of(gateway), by_thread, num_tasks=2)
    assert {rollout.outcome for rollout in rollouts(groups)} == {Outcome.OK}


@pytest.mark.parametrize("workflow", [by_client, by_environment])
def test_a_model_at_an_endpoint_knows_its_rollout_too(workflow: Workflow) -> None:
    """Red when `RemoteSession.send` does not ask."""
    endpoint = FakeEndpoint()
    remote = RemoteModel(name="m", model_name="m", base_url=endpoint.url, api_key="k")

    def open_session(rollout_id: str, noise_seed: int) -> RolloutModels:
        return RolloutModels(remote.open(rollout_id, noise_seed, Tally(Meter("m", "m", None))))

    try:
        groups = roll_out(open_session, workflow, num_tasks=4)
    finally:
        remote.close()
        endpoint.stop()
    failed = [rollout for rollout in rollouts(groups) if rollout.outcome == Outcome.WORKFLOW_ERROR]
    assert len(failed) >= 12
    assert all(rollout.error is not None and "its own workflow received" in rollout.error for rollout in failed)
