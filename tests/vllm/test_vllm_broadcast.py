"""New weights by broadcast to real workers of vLLM: the way between GPUs, with gloo in NCCL's place."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from vllm_served import Served, request, scored, start, vllm_left, vllm_processes, weights

from sharpen.engine.routing import Replicas
from sharpen.engine.vllm.broadcast import _COMMUNICATORS, BroadcastGroup, in_thread, lay_out
from sharpen.engine.vllm.loading import Loader
from sharpen.errors import EngineLostError

CPU = torch.device("cpu")
LIMIT_S = 300.0
CHUNK_BYTES = 2**20


class Apart(Loader):
    """As if the trainer and each worker had a device of their own, which are their processes here."""

    missing = 0

    def _source(self, tensors):
        return CPU

    async def _try_handles(self, gpu):
        return [(True, "on another device")] * (self._llm.vllm_config.parallel_config.world_size + self.missing)


class OneNeverComes(Apart):
    missing = 1


class KillsAWorker(Apart):
    """In the midst of its third broadcast, which then waits until the group is left, as NCCL does."""

    victim: psutil.Process
    sent = 0
    left = False

    def _send(self, tensors, layout):
        self.sent += 1
        if self.sent < 3:
            super()._send(tensors, layout)
            return
        super()._send(tensors, layout[:2])
        self.victim.kill()
        while not self._group._closed:
            time.sleep(0.05)
        self.left = True


@pytest.fixture
def spread(shared: Served, model: Any) -> Iterator[Served]:
    """The shared engine, for a test that replaces its loader."""
    kept = shared.engine._loader
    yield shared
    shared.engine._loader.close()
    shared.run(shared.engine._llm.shutdown_weight_transfer_engine())
    shared.engine._loader = kept
    shared.run(shared.engine.load(shared.engine.version + 1, weights(model)))


@pytest.fixture
def wide(spread: Served) -> Iterator[tuple[Served, psutil.Process]]:
    """An engine of two workers, and the second of them. Nothing of it is left."""
    known = {process.pid for process in vllm_processes()}
    served = start(spread.thread, max_slots=4, tensor_parallel_size=2)
    yield served, next(one for one in vllm_processes() if one.pid not in known and one.name().endswith("TP1"))
    spread.thread.call(served.engine.close(), LIMIT_S)
    assert not vllm_left(known)


def check(engine: Any, served: Served, model: Any, version: int) -> None:
    asked = [request([506, 60 + i], noise=i) for i in range(4)]
    for one, generation in zip(asked, Served(engine, served.thread).generate(*asked), strict=True):
        assert set(generation.versions.tolist()) == {version}
        np.testing.assert_allclose(generation.logprobs, scored(model, one, generation), atol=1e-4)


def test_two_replicas_get_their_weights_by_broadcast_and_one_goes_on_alone(spread, wide, model, changed):
    """One has two workers (tensor parallel), each replica is a group with the trainer. Both serve the new weights, tied
    ones included, and then newer ones. A worker that dies in the midst of a broadcast loses its replica and hangs
    nothing. Red when `finish_weight_update` does not `pack_tied_layers`, and when `_receive`
    (engine/vllm/loading.py) does not leave the group."""
    wide, victim = wide
    engines = [spread.engine, wide.engine]
    for engine, kind in zip(engines, (Apart, KillsAWorker), strict=True):
        engine._loader = kind(engine._llm, join_limit_s=LIMIT_S, chunk_bytes=CHUNK_BYTES)
    wide.engine._loader.victim = victim
    both, version = Replicas(engines), spread.engine.version
    for new in (changed, model):
        version += 1
        spread.thread.call(both.load(version, weights(new)), LIMIT_S)
        for engine in engines:
            check(engine, spread, new, version)
    assert [engine._loader.ways for engine in engines] == [["nccl"], ["nccl", "nccl"]]
    assert wide.engine._loader.sent == 2
    spread.thread.call(both.load(version + 1, weights(changed)), LIMIT_S)
    assert both.num_serving == 1
    assert both.version == version + 1
    check(both, spread, changed, version + 1)
    with pytest.raises(EngineLostError, match="new weights could not be loaded into vLLM"):
        wide.generate(request([506, 60]))
    deadline = time.monotonic() + 60
    while not wide.engine._loader.left and time.monotonic() < deadline:
        time.sleep(0.05)
    assert wide.engine._loader.left


def test_where_a_group_does_not_come_about_the_file_does(spread, model, changed, caplog):
    """A member that never comes: one line tells it, and this update and the next travel through the file. Red when
    `_choose` (engine/vllm/loading.py) takes no notice of it."""
    spread.engine._loader = OneNeverComes(spread.engine._llm, join_limit_s=5.0)
    for new in (changed, model):
        version = spread.engine.version + 1
        spread.thread.call(spread.engine.load(version, weights(new)), LIMIT_S)
        check(spread.engine, spread, new, version)
    assert spread.engine._loader.ways == []
    (record,) = (one for one in caplog.records if "new weights" in one.message)
    assert "travel through a file, not by NCCL between GPUs: worker 0: " in record.message
    assert "the trainer: " in record.message


def meet(*works):
    """What two members do, each in a thread: their results or errors, the first one's first."""
    futures = [in_thread(work) for work in works]
    wait(futures, LIMIT_S, FIRST_EXCEPTION)
    return [future.exception(LIMIT_S) or future.result() for future in futures]


def listen() -> tuple[socket.socket, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def test_a_trial_that_arrives_changed_is_told():
    """Red when `BroadcastGroup.join` does not look at the values."""
    from vllm.distributed.utils import StatelessProcessGroup

    listener, port = listen()
    worker = BroadcastGroup(CPU, rank=1, size=2, port=port)

    def liar():
        met = StatelessProcessGroup.create("127.0.0.1", port, 0, 2, listen_socket=listener)
        one = _COMMUNICATORS["cpu"](met, CPU, LIMIT_S)
        one.broadcast(torch.zeros(3), src=0, stream=None)
        return one

    _, error = meet(liar, lambda: worker.join(LIMIT_S))
    assert isinstance(error, RuntimeError)
    assert str(error) == "(0.0, 0.0, 0.0) arrived where (3.0, 1.0, 4.0) was sent"


@pytest.mark.parametrize("chunk_bytes", [1, 40, 10_000])
def test_tensors_arrive_as_they_are_whatever_travels_together(chunk_bytes):
    """In the engine's number format; one that is larger than a chunk travels alone."""
    sent = {f"p{number}": torch.randn(shape) for number, shape in enumerate([(3,), (4, 5), (), (2, 2), (1,)])}
    sent["view"] = torch.randn(6, 4).t()
    layout = lay_out(sent, torch.bfloat16, chunk_bytes)
    assert len(layout) == {1: 6, 40: 4, 10_000: 1}[chunk_bytes]
    listener, port = listen()
    trainer, worker = (BroadcastGroup(CPU, rank=rank, size=2, port=port) for rank in range(2))

    def send():
        trainer.join(LIMIT_S, listener)
        trainer.send(sent, layout, torch.bfloat16)

    def receive():
        worker.join(LIMIT_S)
        return dict(worker.receive(layout, torch.bfloat16))

    ended, found = meet(send, receive)
    assert ended is None
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        torch.testing.assert_close(found[name], tensor.bfloat16(), rtol=0, atol=0)
    for group in (trainer, worker):
        group.close()
        group.close()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.send(sent, layout, torch.bfloat16)
