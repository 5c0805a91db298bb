"""Two replicas of vLLM on a CPU: both serve the new weights, and one goes on when the other is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
from vllm_served import Served, request, scored, start, vllm_left, vllm_processes, weights

from agenttune.inference.routing import Replicas


def test_two_replicas_serve_and_one_goes_on_alone(model, changed):
    """Each has a worker of its own; after a load both answer with the new weights; the calls that a killed one was
    serving are answered by the other. Red when `generate` (inference/routing.py) does not try again elsewhere."""
    known = {process.pid for process in vllm_processes()}
    first = start(max_slots=8, replica=(0, 2))
    workers = [one for one in vllm_processes() if one.pid not in known and "Worker" in one.name()]
    second = start(first.thread, max_slots=8, replica=(1, 2))
    engines = [first.engine, second.engine]
    both = Served(Replicas(engines), first.thread)
    asked = [replace(request([506, 60 + i], noise=i), session=f"rollout-{i}") for i in range(4)]
    both.run(both.engine.load(1, weights(changed)))
    for one, generation in zip(asked, both.generate(*asked), strict=True):
        np.testing.assert_allclose(generation.logprobs, scored(changed, one, generation), atol=1e-4)
    assert [engine._num_requests for engine in engines] == [2, 2]
    both.generate(asked[0], asked[2])
    assert [engine._num_requests for engine in engines] == [4, 2]

    long = [replace(one, sampling=replace(one.sampling, max_tokens=400, temperature=1.5)) for one in asked]

    async def killed():
        calls = [asyncio.ensure_future(both.engine.generate(replace(one, noise=7))) for one in long]
        await asyncio.sleep(0.05)
        os.kill(workers[0].pid, signal.SIGKILL)
        return await asyncio.gather(*calls)

    for one, generation in zip(long, both.run(killed()), strict=True):
        np.testing.assert_allclose(generation.logprobs, scored(changed, one, generation), atol=1e-4)
    assert both.engine.num_serving == 1
    both.run(both.engine.load(2, weights(model)))
    assert both.engine.version == 2
    (generation,) = both.generate(asked[0])
    assert set(generation.versions.tolist()) == {2}
    both.run(both.engine.close())
    first.thread.close()
    assert not vllm_left(known)
