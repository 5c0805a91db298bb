"""New weights in vLLM: what they change, what must not survive them, requests in flight, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm_served import endless, generating, request, scored, weights

from sharpen.errors import ModelError

LONG = [(7 * i + 3) % 500 for i in range(300)]  # more than two blocks of the prefix cache


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trap_29_logprobs_after_a_load_are_the_new_models(served, changed, temperature):
    """Every layer follows, the output layer that is tied to the embedding too. Red without `pack_tied_layers` in
    `Transfer.finish_weight_update`."""
    probe = [request([506, 60 + i], noise=i, temperature=temperature) for i in range(4)]
    version = served.engine.version + 1
    served.run(served.engine.load(version, weights(changed)))
    assert served.engine.version == version
    for asked, generation in zip(probe, served.generate(*probe), strict=True):
        assert set(generation.versions.tolist()) == {version}
        np.testing.assert_allclose(generation.logprobs, scored(changed, asked, generation), atol=1e-4)


def test_trap_14_the_prefix_cache_does_not_survive_a_load(served, model, changed):
    """Red with `clear_cache=False` in `Loader.load`."""
    asked = request(LONG, max_tokens=8)
    for _ in range(2):  # the second comes from the cache
        (before,) = served.generate(asked)
        np.testing.assert_allclose(before.logprobs, scored(model, asked, before), atol=1e-4)
    served.run(served.engine.load(served.engine.version + 1, weights(changed)))
    (after,) = served.generate(asked)
    np.testing.assert_allclose(after.logprobs, scored(changed, asked, after), atol=1e-4)


def test_trap_13_requests_in_flight_go_on_under_the_new_weights(served, model, changed):
    """Each token has the version, and the logprob, of the weights that it was computed with, its whole context
    included; a request that comes during the load is served by the new ones. Red with `clear_cache=False`."""
    prompts = [[506, *range(40, 40 + length)] for length in (3, 30, 140)]
    asked = [request(prompt, noise=9, max_tokens=340, temperature=1.5) for prompt in prompts]
    old = served.engine.version

    async def scenario():
        with endless(served.engine):
            calls = await generating(served.engine, *asked)
            loading = asyncio.ensure_future(served.engine.load(old + 1, weights(changed)))
            calls += [asyncio.ensure_future(served.engine.generate(one)) for one in asked[:1]]
            await loading
        return await asyncio.gather(*calls)

    *running, late = served.run(scenario())
    for one, generation in zip(asked, running, strict=True):
        versions = generation.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {old, old + 1}
        by_version = np.stack([scored(either, one, generation) for either in (model, changed)])
        expected = by_version[generation.versions - old, np.arange(len(versions))]
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
    assert late.versions[-1] == old + 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing in the new weights: model.norm.weight"),
        (lambda w: w.update({"model.nothing": torch.zeros(1)}), "unknown parameter names"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), "has shape"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(512, 192)}), "one tied parameter"),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_changes(served, model, changed, change, words):
    wrong = dict(weights(changed))
    change(wrong)
    version = served.engine.version
    with pytest.raises(ModelError, match=words):
        served.run(served.engine.load(version + 1, wrong))
    assert served.engine.version == version
    asked = request([506, 61])
    (generation,) = served.generate(asked)
    np.testing.assert_allclose(generation.logprobs, scored(model, asked, generation), atol=1e-4)


def test_a_worker_tells_why_it_cannot_read_the_trainers_gpu(served):
    """There is none here. The core would be of no use any more if the worker let the error through."""
    packed = base64.b64encode(pickle.dumps(("GPU of another machine", []))).decode()
    ((elsewhere, reason),) = served.run(served.engine._llm.collective_rpc("sharpen_try_to_read", args=(packed,)))
    assert reason
    assert not elsewhere
    served.generate(request([506, 61]))


def test_no_file_stays_in_shared_memory(served):
    assert not list(Path("/dev/shm").glob(f"{served.engine._folder.name}*"))
