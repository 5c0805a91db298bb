"""Names of agents: they travel with the key, in any protocol and any of its places."""

from typing import Any

import httpx
import pytest

from sharpen.errors import ConfigError

USER: Any = [{"role": "user", "content": "hello"}]


def test_every_client_of_a_named_model_carries_the_name(serve: Any) -> None:
    session = serve("hi").open()
    planner = session.model.named("planner")
    assert planner is session.model.named("planner")
    planner.sync_client.chat.completions.create(model="toy", messages=USER)
    planner.sync_anthropic_client.messages.create(model="other", max_tokens=9, messages=USER)
    body = {"model": "toy", "input": "hello"}
    assert httpx.post(f"{planner.keyed_url}/responses", json=body).status_code == 200
    headers = {"Authorization": f"Bearer {planner.environment()['OPENAI_API_KEY']}"}
    assert httpx.post(f"{planner.base_url}/responses", headers=headers, json=body).status_code == 200
    planner.named("coder").sync_client.chat.completions.create(model="toy", messages=USER)
    session.model.sync_client.chat.completions.create(model="toy", messages=USER)
    calls = session.close()
    assert [call.agent for call in calls] == ["planner"] * 4 + ["coder", ""]
    assert [call.model for call in calls] == ["", "other", "", "", "", ""]
    assert httpx.post(f"{planner.base_url}/responses", headers=headers, json=body).status_code == 401


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a/b", "x" * 65])
def test_a_name_that_cannot_travel_is_refused(serve: Any, name: str) -> None:
    session = serve("hi").open()
    with pytest.raises(ConfigError, match="agent's name"):
        session.model.named(name)
