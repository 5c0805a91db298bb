"""Several engines behind one: who gets which request, the version that is told, and replicas that are lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.routing import Replicas
from sharpen.errors import EngineError, EngineLostError, ModelError
from sharpen.types import Sampling


class Scripted:
    """An engine that answers with its own number when it is let go, and fails with `failure` if that is set."""

    def __init__(self, number: int, max_model_len: int = 64) -> None:
        self.number, self.max_model_len, self.version = number, max_model_len, 0
        self.sessions: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.failure: Exception | None = None
        self.closed = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.sessions.append(request.session)
        await self.go.wait()
        self._fail()
        ids = np.asarray([self.number], np.int32)
        return Generation(ids=ids, logprobs=ids.astype(np.float32), versions=ids, finish_reason="stop")

    async def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        await self.go.wait()
        self._fail()
        self.version = version

    async def close(self) -> None:
        self.closed += 1

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


def request(session: str = "") -> GenerateRequest:
    return GenerateRequest(prompt_ids=np.asarray([1], np.int32), sampling=Sampling(), noise=1, session=session)


async def served_by(replicas: Replicas, *sessions: str) -> list[int]:
    return [int((await replicas.generate(request(session))).ids[0]) for session in sessions]


def hold(*engines: Scripted) -> None:
    for engine in engines:
        engine.go.clear()


def test_a_session_stays_on_its_replica_and_new_ones_go_to_the_least_busy():
    """Red when `_home` (engine/routing.py) forgets the session, or takes any replica for a new one."""

    async def scenario():
        engines = [Scripted(0), Scripted(1), Scripted(2)]
        replicas = Replicas(engines)
        hold(*engines)
        calls = [asyncio.ensure_future(replicas.generate(request(f"r{number}"))) for number in range(6)]
        await asyncio.sleep(0)
        assert [engine.sessions for engine in engines] == [["r0", "r3"], ["r1", "r4"], ["r2", "r5"]]
        engines[2].go.set()
        await asyncio.gather(calls[2], calls[5])
        calls += [asyncio.ensure_future(replicas.generate(request(name))) for name in ("r0", "new", "r1", "", "r3")]
        await asyncio.sleep(0)
        assert engines[0].sessions == ["r0", "r3", "r0", "r3"]
        assert engines[1].sessions == ["r1", "r4", "r1"]
        assert engines[2].sessions == ["r2", "r5", "new", ""]
        for engine in engines:
            engine.go.set()
        await asyncio.gather(*calls)
        assert await served_by(replicas, "r5", "r4", "r3") == [2, 1, 0]

    asyncio.run(scenario())


def test_a_cancelled_or_failed_request_no_longer_counts():
    """Red when `_generate` (engine/routing.py) counts down only what ended well."""

    async def scenario():
        engines = [Scripted(0), Scripted(1)]
        replicas = Replicas(engines)
        hold(engines[0])
        call = asyncio.ensure_future(replicas.generate(request()))
        await asyncio.sleep(0)
        assert await served_by(replicas, "") == [1]
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        engines[0].go.set()
        engines[0].failure = EngineError("this one only")
        with pytest.raises(EngineError, match="this one only"):
            await replicas.generate(request())
        engines[0].failure = None
        assert await served_by(replicas, "") == [0]

    asyncio.run(scenario())


def test_sessions_that_are_remembered_are_bounded():
    """Red when `_home` never forgets, or forgets one that still asks."""

    async def scenario():
        engines = [Scripted(0), Scripted(1)]
        replicas = Replicas(engines, max_sessions=2)
        hold(engines[0])
        held = asyncio.ensure_future(replicas.generate(request()))
        await asyncio.sleep(0)
        assert await served_by(replicas, "a", "b", "a", "c") == [1, 1, 1, 1]
        engines[0].go.set()
        await held
        assert await served_by(replicas, "a", "b") == [1, 0]
        assert len(replicas._homes) == 2

    asyncio.run(scenario())


def test_new_weights_reach_all_replicas_and_the_oldest_version_is_reported():
    async def scenario():
        engines = [Scripted(0, max_model_len=64), Scripted(1, max_model_len=32)]
        replicas = Replicas(engines)
        assert replicas.max_model_len == 32
        hold(engines[1])
        loading = asyncio.ensure_future(replicas.load(3, {}))
        while not engines[0].version:
            await asyncio.sleep(0)
        assert [engine.version for engine in engines] == [3, 0]
        assert replicas.version == 0
        engines[1].go.set()
        await loading
        assert replicas.version == 3
        engines[0].failure = ModelError("of another model")
        with pytest.raises(ModelError, match="of another model"):
            await replicas.load(4, {})
        assert replicas.num_serving == 2

    asyncio.run(scenario())


def test_a_lost_replica_leaves_its_calls_and_sessions_to_the_others(caplog):
    """Red when `generate` (engine/routing.py) does not try again elsewhere, or keeps a lost replica."""

    async def scenario():
        engines = [Scripted(0), Scripted(1)]
        replicas = Replicas(engines)
        assert await served_by(replicas, "mine", "mine") == [0, 0]
        hold(engines[0])
        calls = [asyncio.ensure_future(replicas.generate(request(name))) for name in ("mine", "mine")]
        await asyncio.sleep(0)
        engines[0].failure = EngineLostError("its processes died")
        engines[0].go.set()
        assert [int(one.ids[0]) for one in await asyncio.gather(*calls)] == [1, 1]
        await replicas.load(5, {})
        assert replicas.version == 5, "the version of the lost one does not count"
        assert await served_by(replicas, "mine", "other") == [1, 1]
        assert len(await replicas.generate_each(request())) == 1
        assert engines[0].sessions == ["mine"] * 4
        await replicas.close()
        assert [engine.closed for engine in engines] == [1, 1]
        with pytest.raises(EngineLostError, match="no replica"):
            await replicas.generate(request("mine"))

    with caplog.at_level(logging.ERROR, "sharpen"):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "replica 0 of the engine is lost, 1 of 2 continue: its processes died"
    ]


def test_when_the_last_replica_is_lost_nothing_is_served():
    async def scenario():
        engines = [Scripted(0), Scripted(1)]
        replicas = Replicas(engines)
        engines[0].failure = engines[1].failure = EngineLostError("its processes died")
        with pytest.raises(EngineLostError, match="its processes died"):
            await replicas.generate(request("mine"))
        for again in (replicas.generate(request("mine")), replicas.generate_each(request()), replicas.load(1, {})):
            with pytest.raises(EngineLostError, match="no replica"):
                await again

    asyncio.run(scenario())


def test_a_replica_lost_during_a_load_is_removed():
    async def scenario():
        engines = [Scripted(0), Scripted(1)]
        replicas = Replicas(engines)
        engines[1].failure = EngineLostError("its processes died")
        await replicas.load(1, {})
        assert (replicas.version, replicas.num_serving) == (1, 1)
        assert await served_by(replicas, "a", "b") == [0, 0]
        engines[0].failure = EngineLostError("its processes died")
        with pytest.raises(EngineLostError, match="its processes died"):
            await replicas.load(2, {})

    asyncio.run(scenario())
