"""What user code receives while AgentScope is imported: its own model class, with our object's attributes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest
from agentscope.model import OpenAIChatModel

from sharpen import TrinityChatModel, WorkflowOutput
from sharpen.agent.agentscope.console import SWITCH, silent_agents
from sharpen.agent.agentscope.model import present
from sharpen.placement.auxiliary.endpoint import Endpoint
from sharpen.types import Outcome

USER: Any = [{"role": "user", "content": "hello"}]


def test_a_real_instance_with_our_attributes(rollouts: Any) -> None:
    made = rollouts("hi")
    session = made.open("g/0", 7)
    model = session.model
    assert isinstance(model, OpenAIChatModel)
    assert isinstance(model, TrinityChatModel)
    assert type(model.client) is openai.AsyncOpenAI
    assert model.name == "toy"
    assert model.client.api_key == model.api_key
    assert model.base_url.startswith("http://127.0.0.1:")
    assert model.sync_client.chat.completions.create(model=model.name, messages=USER).choices[0].message.content == "hi"
    assert len(model.calls()) == 1
    with pytest.raises(AttributeError, match="no_such_attribute"):
        _ = model.no_such_attribute
    session.close()


def test_plain_clients_and_http_work_beside_it(rollouts: Any) -> None:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        await model.client.chat.completions.create(model=model.name, messages=USER)
        await asyncio.to_thread(model.sync_client.chat.completions.create, model=model.name, messages=USER)
        async with httpx.AsyncClient() as client:
            reply = await client.post(
                f"{model.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {model.api_key}"},
                json={"model": model.name, "messages": USER},
            )
        return WorkflowOutput(reward=float(reply.status_code == 200))

    (group,) = rollouts("hi").run(workflow)
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward, len(rollout.calls)) == (Outcome.OK, 1.0, 3), rollout.error


def test_an_agents_client_may_be_replaced_by_ours(rollouts: Any) -> None:
    """`agent_model.client = model.client`, where the agent made its own model object."""

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        own = present(Endpoint(base_url="http://nowhere.invalid/v1", name="toy", api_key="none"))
        own.client = model.client
        await own.client.chat.completions.create(model=own.name, messages=USER)
        return WorkflowOutput(reward=1.0)

    (group,) = rollouts("hi").run(workflow)
    assert [len(rollout.calls) for rollout in group.rollouts] == [1]


def test_an_endpoint_is_presented_too() -> None:
    endpoint = Endpoint(base_url="http://nowhere.invalid/v1", name="judge", api_key="key")
    model = present(endpoint)
    assert isinstance(model, OpenAIChatModel)
    assert isinstance(model, TrinityChatModel)
    assert (model.base_url, model.name, model.api_key) == ("http://nowhere.invalid/v1", "judge", "key")
    assert model.client is endpoint.client
    assert present(model) is model


def test_agents_are_silent_during_a_run_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    with silent_agents():
        assert os.environ[SWITCH] == "true"
    assert SWITCH not in os.environ
    monkeypatch.setenv(SWITCH, "false")
    with silent_agents():
        assert os.environ[SWITCH] == "false"
    assert os.environ[SWITCH] == "false"


def test_installed_but_not_imported_is_not_in_use() -> None:
    code = (
        "import sys\n"
        "from sharpen.agent.agentscope.model import imported_line, present\n"
        "model = object()\n"
        "assert imported_line() is None and present(model) is model and 'agentscope' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_making_one_is_cheap(rollouts: Any) -> None:
    """A client that AgentScope makes for itself reads certificates, 10 ms and more; 256 rollouts would wait for it."""
    import time

    made = rollouts("hi")
    sessions = [made.gateway.open(f"g/{i}", noise_seed=i) for i in range(51)]
    present(sessions[0].model)
    began = time.thread_time()
    for session in sessions[1:]:
        present(session.model)
    assert (time.thread_time() - began) / 50 < 0.003
