"""An endpoint that is evaluated: nothing is recorded there, but it is known whether it answered."""

from __future__ import annotations

import openai
import pytest
from fake_endpoint import FakeEndpoint

from sharpen.placement.auxiliary.remote import RemoteModel


def test_answers_of_an_endpoint_are_counted(endpoint: FakeEndpoint) -> None:
    """Red when `RemoteSession.send` does not count: each rollout of the evaluation would be one without a call."""
    remote = RemoteModel(name="policy", model_name="m", base_url=endpoint.url, api_key="k")
    try:
        session = remote.open("eval/0", 1)
        assert (session.num_answers, session.cut) == (0, False)
        session.model.sync_client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
        session.model.sync_client.models.list()
        assert session.num_answers == 1
        session.close()
        with pytest.raises(openai.AuthenticationError):
            session.model.sync_client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert session.num_answers == 1
    finally:
        remote.close()
