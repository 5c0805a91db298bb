"""A conversation of two turns through the gateway, served by vLLM: later calls continue the recorded ids."""

from __future__ import annotations

import numpy as np
from transformers import AutoTokenizer
from vllm_served import MODEL, request, scored

from sharpen.gateway.gateway import Gateway
from sharpen.types import Sampling


def test_the_second_call_begins_with_the_ids_of_the_first(served, model):
    gateway = Gateway(
        served.engine,
        AutoTokenizer.from_pretrained(MODEL),
        model_name="policy",
        loop=served.thread.loop,
        sampling=Sampling(temperature=0.8, max_tokens=60),
    )
    session = gateway.open("group/0", noise_seed=3)
    client = session.model.sync_client
    messages = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he?"}]
    first = client.chat.completions.create(model="policy", messages=messages, logprobs=True, top_logprobs=2)
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "And with 5 more?"})
    client.chat.completions.create(model="policy", messages=messages)
    one, two = session.close()
    served.run(gateway.close())
    assert all(len(entry.top_logprobs) == 2 for entry in first.choices[0].logprobs.content)
    assert two.parent == 0
    ids = [*one.prompt_ids_P.tolist(), *one.sampled_ids_S.tolist()]
    assert two.prompt_ids_P.tolist()[: len(ids)] == ids
    assert len(two.prompt_ids_P) > len(ids)
    for call in (one, two):
        asked = request(call.prompt_ids_P.tolist(), temperature=0.8)
        generation = type("Recorded", (), {"ids": call.sampled_ids_S})
        np.testing.assert_allclose(call.logprobs_S, scored(model, asked, generation), atol=1e-4)
        assert set(call.versions_S.tolist()) == {served.engine.version}
