"""Two replicas of vLLM on a CPU, one over two workers: both serve new weights, and one goes on when the other dies."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from vllm_served import Served, as_for_users, begun, request, scored, start, vllm_left, vllm_processes, weights

from sharpen.engine.routing import Replicas
from sharpen.errors import EngineLostError


def check(model, asked, generations, version):
    for one, generation in zip(asked, generations, strict=True):
        assert set(generation.versions.tolist()) == {version}
        np.testing.assert_allclose(generation.logprobs, scored(model, one, generation), atol=1e-4)


def test_two_replicas_serve_and_one_goes_on_alone(shared, model, changed):
    """The first has two workers, each with its part of every weight: red without `pack_tied_layers` in
    `Transfer.finish_weight_update`. One of them is killed: its calls end with one error, and through `Replicas` the
    other replica answers them; red when `generate` (engine/routing.py) does not try again elsewhere."""
    known = {process.pid for process in vllm_processes()}
    with as_for_users():
        first = start(shared.thread, max_slots=8, tensor_parallel_size=2)
    workers = [one for one in vllm_processes() if one.pid not in known and "Worker" in one.name()]
    assert len(workers) == 2
    engines = [first.engine, shared.engine]
    both = Served(Replicas(engines), shared.thread)
    asked = [replace(request([506, 60 + i], noise=i), session=f"rollout-{i}") for i in range(4)]
    check(model, asked, first.generate(*asked), 0)
    version = shared.engine.version + 1
    both.run(both.engine.load(version, weights(changed)))
    before = [engine._num_requests for engine in engines]
    check(changed, asked, both.generate(*asked), version)
    assert [engine._num_requests - number for engine, number in zip(engines, before, strict=True)] == [2, 2]
    both.generate(asked[0], asked[2])
    assert [engine._num_requests - number for engine, number in zip(engines, before, strict=True)] == [4, 2]

    long = [replace(one, sampling=replace(one.sampling, max_tokens=400)) for one in asked]

    async def killed():
        workers[1].suspend()  # no call of this replica ends before it is killed
        alone = await begun(first.engine, *long[:2])
        calls = [asyncio.ensure_future(both.engine.generate(replace(one, noise=7))) for one in long]
        await asyncio.sleep(0)
        os.kill(workers[1].pid, signal.SIGKILL)
        return await asyncio.gather(*calls), await asyncio.gather(*alone, return_exceptions=True)

    answered, ended = both.run(killed())
    check(changed, [replace(one, noise=7) for one in long], answered, version)
    assert all(isinstance(error, EngineLostError) for error in ended), ended
    for refused in (first.engine.generate(request([9])), first.engine.load(version + 1, weights(model))):
        with pytest.raises(EngineLostError, match="died"):
            first.run(refused)
    assert both.engine.num_serving == 1
    both.run(both.engine.load(version + 1, weights(model)))
    assert both.engine.version == version + 1
    check(model, asked[:1], both.generate(asked[0]), version + 1)
    first.run(first.engine.close())
    assert not vllm_left(known)
