"""Decode steps by recorded graphs: a fake recorder shows on a CPU that a replay computes what the eager step does, from
nothing but its static inputs; on a GPU the real ones are compared with eager steps."""

from __future__ import annotations

import asyncio

import pytest
import torch
from test_engine_adapters import Served, requests_of
from toy_engines import make_engine, make_model, prompt_of, request, run_all

from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.embedded.graphs import DecodeGraphs, rounded_length
from sharpen.engine.embedded.kv import KVPool


class FakeRecorder:
    """A replay computes again what was recorded; the KV that it reads must lie where it lay."""

    def __init__(self, failing: bool = False) -> None:
        self.pool: KVPool
        self.recorded = 0
        self.failing = failing

    def __call__(self, run):
        if self.failing:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self.recorded += 1
        result = run()
        blocks = list(self.pool._blocks())

        def replay() -> None:
            assert all(was is now for was, now in zip(blocks, self.pool._blocks(), strict=True))
            result.copy_(run())

        return replay, result


def with_graphs(engine: EmbeddedEngine, record: FakeRecorder, **settings: int) -> DecodeGraphs:
    record.pool = engine._scheduler.pool
    graphs = DecodeGraphs(
        forward=engine._stepper._forward,
        pool=engine._scheduler.pool,
        parameters=engine._model.parameters,
        device=torch.device("cpu"),
        record=record,
        **settings,
    )
    engine._stepper.graphs = graphs
    return graphs


def some_requests(count: int = 9):
    """Ragged prompts and lengths, some cached prefixes, several temperatures and truncations."""
    shared = prompt_of(20, 99)
    return [
        request(
            shared[: 5 * (n % 3)] + prompt_of(3 + 9 * n, n),
            noise=n,
            max_tokens=10 + 11 * n,
            temperature=(1.0, 0.7, 0.0)[n % 3],
            top_p=0.9 if n % 4 == 0 else 1.0,
        )
        for n in range(count)
    ]


def assert_same(mine, other, atol=1e-5):
    for one, two in zip(mine, other, strict=True):
        assert one.ids.tolist() == two.ids.tolist()
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(two.logprobs), atol=atol, rtol=0)


def test_replayed_steps_give_the_tokens_of_eager_ones():
    """Slots are freed, compacted, and grow while graphs are in use.

    Break: in `_Graph.logits` do not copy the inputs; or in `DecodeGraphs.logits` keep the graphs of an older pool.
    """
    expected = run_all(make_engine(make_model("qwen3")), some_requests())
    engine, record = make_engine(make_model("qwen3")), FakeRecorder()
    graphs = with_graphs(engine, record)
    assert_same(run_all(engine, some_requests()), expected)
    assert graphs.replays == engine.stats.replayed_steps > engine.stats.steps // 2
    assert 0 < record.recorded < graphs.replays


def test_graphs_live_through_new_weights_and_compute_with_them():
    """Weights are copied in place, so graphs stay; where they came to lie elsewhere, graphs go.

    Break: leave `check_addresses()` out of `EmbeddedEngine.load`.
    """
    engine, record = make_engine(make_model("qwen3")), FakeRecorder()
    graphs = with_graphs(engine, record)
    run_all(engine, some_requests())
    shapes = set(graphs._graphs)
    weights = {name: tensor.detach().clone() for name, tensor in make_model("qwen3", 1).named_parameters()}
    asyncio.run(engine.load(1, weights))
    assert set(graphs._graphs) == shapes
    expected = run_all(make_engine(make_model("qwen3", 1)), some_requests())
    assert_same(run_all(engine, some_requests()), expected)
    engine._model.model.norm.weight.data = engine._model.model.norm.weight.data.clone()
    asyncio.run(engine.load(2, weights))
    assert not graphs._graphs
    assert_same(run_all(engine, some_requests()), expected)


def test_a_pool_that_is_allocated_anew_drops_graphs():
    engine = make_engine(make_model("qwen3"), max_model_len=512)
    graphs = with_graphs(engine, FakeRecorder())
    run_all(engine, [request(prompt_of(10, 1), max_tokens=20)])
    assert graphs._graphs
    before, recorded = engine._scheduler.pool.allocation, graphs._allocation
    run_all(engine, [request(prompt_of(300, 2), noise=3, max_tokens=20)])
    assert engine._scheduler.pool.allocation > before
    assert graphs._allocation > recorded
    expected = run_all(make_engine(make_model("qwen3"), max_model_len=512), some_requests())
    assert_same(run_all(engine, some_requests()), expected)


def test_a_failed_recording_warns_and_steps_continue_eagerly():
    engine = make_engine(make_model("qwen3"))
    graphs = with_graphs(engine, FakeRecorder(failing=True))
    with pytest.warns(UserWarning, match="without CUDA graphs, since recording one failed: RuntimeError: operation"):
        found = run_all(engine, some_requests())
    assert_same(found, run_all(make_engine(make_model("qwen3")), some_requests()))
    assert graphs.replays == 0
    assert "not permitted" in graphs.off


def test_few_graphs_are_kept():
    engine, record = make_engine(make_model("qwen3")), FakeRecorder()
    graphs = with_graphs(engine, record, max_graphs=2)
    expected = run_all(make_engine(make_model("qwen3")), some_requests())
    assert_same(run_all(engine, some_requests()), expected)
    assert len(graphs._graphs) == 2 < record.recorded


def test_lengths_are_rounded_to_few():
    """Multiples of a page, never shorter, at most a quarter longer from 256 on, never beyond the pool."""
    lengths = range(64, 32768 + 64, 64)
    rounded = [rounded_length(length, 1 << 20) for length in lengths]
    assert all(length <= found and found % 64 == 0 for length, found in zip(lengths, rounded, strict=True))
    assert all(found <= length * 1.25 for length, found in zip(lengths, rounded, strict=True) if length >= 256)
    assert len(set(rounded)) < 40
    assert rounded_length(1088, 1152) == 1152


def test_a_closed_engine_keeps_no_weights():
    engine = make_engine(make_model("qwen3"))
    graphs = with_graphs(engine, FakeRecorder())
    run_all(engine, some_requests())
    asyncio.run(engine.close())
    assert not graphs._graphs
    assert not hasattr(graphs, "_forward")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_gpu_graphs_give_what_eager_steps_give(family):
    """fp32, so that the same tokens are drawn; weights come anew in between."""
    requests = some_requests(24)
    eager, graphed = (make_engine(make_model(family).to("cuda"), max_slots=24) for _ in range(2))
    eager._stepper.graphs = None
    for version in (0, 1):
        if version:
            weights = {name: tensor.detach().clone() for name, tensor in make_model(family, 1).named_parameters()}
            for engine in (eager, graphed):
                asyncio.run(engine.load(version, weights))
        assert_same(run_all(graphed, requests), run_all(eager, requests), atol=1e-4)
    assert graphed.stats.replayed_steps > graphed.stats.steps // 2
    assert graphed._stepper.graphs is not None
    assert not graphed._stepper.graphs.off


def test_graphs_have_the_adapters_of_their_rows_as_inputs():
    """The same shape with other adapters in other rows: a replay computes with those of its step. Red when a graph
    keeps the adapters that it was recorded with."""
    served, record = Served("qwen2"), FakeRecorder()
    engine = make_engine(served.make())
    graphs = with_graphs(engine, record)
    engine.serve_beside(served.adapters)
    for names in (("one", "two", "three", ""), ("three", "", "one", "two"), ("", "", "", "")):
        requests = requests_of(prompt_of(20, 3), names, max_tokens=30)
        assert served.worst(requests, run_all(engine, requests)) < 1e-4
    assert graphs.replays > record.recorded > 0
    assert {span for _, _, span in graphs._graphs} >= {(1, 4), (0, 0)}
