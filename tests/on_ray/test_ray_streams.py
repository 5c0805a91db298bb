"""Tokens of an engine on Ray reach those that wait for them while they are sampled, and as they are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_workflows import actors_of, does_what_the_task_says, make_tasks

from sharpen.contracts import GenerateRequest
from sharpen.errors import EngineError
from sharpen.placement.cluster.engine import EngineActor, EngineClient, answer
from sharpen.types import Outcome, Sampling

LONG = GenerateRequest(
    prompt_ids=np.array([5, 6, 7], np.int32), sampling=Sampling(temperature=1.0, max_tokens=100), noise=3
)


@pytest.fixture(scope="module")
def serving(make_serving):
    return make_serving(does_what_the_task_says, rollout__max_attempts=2)


def test_ids_come_in_parts_and_are_those_of_an_unstreamed_call(serving):
    """Red when `EngineClient.generate` drops `on_tokens`, and when the actor gives all at the end."""
    plain = serving.thread.call(serving.engine.generate(LONG))
    parts: list[Sequence[int]] = []
    streamed = serving.thread.call(serving.engine.generate(replace(LONG, on_tokens=parts.append)))
    assert streamed.ids.tolist() == plain.ids.tolist()
    assert [one for part in parts for one in part] == plain.ids.tolist()[:-1]
    assert len(parts) > 1


PLAIN = {"auxiliary": False, "deterministic": False, "alone": True}


def engine_that_waits(folder: Path) -> Any:
    """The class of an actor whose engine samples two tokens, then none until it is cancelled, which it writes down."""

    class Waits:
        max_model_len, version = 128, 0

        async def generate(self, request: GenerateRequest) -> None:
            request.on_tokens([1])
            request.on_tokens([2])
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                (folder / "cancelled").touch()
                raise

    class WaitingActor(EngineActor):
        def _start(self) -> Any:
            return Waits()

    return WaitingActor


def test_a_reader_that_hangs_up_stops_the_sampling(cluster, tmp_path):
    """Red when the client does not cancel the call, and when the actor does not cancel the engine's."""
    import ray

    actor = ray.remote(engine_that_waits(tmp_path)).options(num_cpus=0).remote(None, None, 1, **PLAIN)
    client = EngineClient(actor, max_model_len=128)
    told: list[int] = []

    async def hang_up() -> None:
        await answer(actor.serve.remote(0, None))
        call = asyncio.ensure_future(client.generate(replace(LONG, on_tokens=told.extend)))
        while told != [1, 2]:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(60):
            while not (tmp_path / "cancelled").exists():
                await asyncio.sleep(0.01)

    asyncio.run(hang_up())
    ray.kill(actor)


def test_a_streamed_call_of_an_engine_that_dies_fails_and_its_rollout_is_tried_again(serving):
    """Red when a streamed call is repeated: who waits has seen tokens of the first one. Ray starts the engine again."""
    (engine,) = actors_of("EngineActor")

    def kill(ids: Sequence[int]) -> None:
        engine.kill()

    with pytest.raises(EngineError, match="process is gone"):
        serving.thread.call(serving.engine.generate(replace(LONG, on_tokens=kill)))
    (group,) = serving.runner.run(make_tasks(1, "streamed"), group_ids=["streamed"], group_size=1)
    (rollout,) = group.rollouts
    assert rollout.outcome == Outcome.OK
    assert len(rollout.calls[0].sampled_ids_S) == 8
