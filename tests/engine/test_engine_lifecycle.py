"""How requests end: end token, stop string, limits, abort, failure, close; and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engines import END, make_engine, make_model, prompt_of, request, run_all

from sharpen.contracts import Generation
from sharpen.engine.embedded.kv import KVLayout, KVPool
from sharpen.engine.embedded.scheduler import Scheduler
from sharpen.errors import EngineError, SamplingError


def spell(ids: list[int]) -> str:
    """A decoder for stop strings: id 10 is 'a', 11 is 'b', ..."""
    return "".join(chr(ord("a") + token - 10) if 10 <= token < 36 else "." for token in ids)


def test_trap_08_truncation_is_told_by_the_finish_reason() -> None:
    """Red when `_accept` calls an end token at the limit "length" (swap its two branches)."""
    engine = make_engine(make_model("qwen3"))
    (free,) = [
        g
        for g in run_all(engine, [request([5, 6], noise=n, max_tokens=200) for n in range(8)])
        if g.finish_reason == "stop"
    ][:1]
    noise = next(
        n
        for n in range(8)
        if run_all(engine, [request([5, 6], noise=n, max_tokens=200)])[0].ids.tolist() == free.ids.tolist()
    )
    (at_limit,) = run_all(engine, [request([5, 6], noise=noise, max_tokens=len(free.ids))])
    assert (at_limit.finish_reason, at_limit.ids[-1]) == ("stop", END)
    (cut,) = run_all(engine, [request([5, 6], noise=noise, max_tokens=len(free.ids) - 1)])
    assert cut.finish_reason == "length"
    assert cut.ids.tolist() == free.ids.tolist()[:-1]


def test_max_tokens_beyond_the_context_is_cut() -> None:
    model = make_model("qwen2")
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    engine = make_engine(model, max_model_len=20)
    (generation,) = run_all(engine, [request(prompt_of(15, 0), max_tokens=100)])
    assert len(generation.ids) == 5
    assert generation.finish_reason == "length"


def test_several_end_tokens() -> None:
    model = make_model("qwen3")
    model.generation_config.eos_token_id = list(range(40))
    engine = make_engine(model)
    (generation,) = run_all(engine, [request([50], max_tokens=100)])
    assert generation.finish_reason == "stop"
    assert generation.ids[-1] < 40
    assert all(generation.ids[:-1] >= 40)


def test_stop_string_ends_with_the_text_before_it() -> None:
    engine = make_engine(make_model("qwen3"), stop_decoder=spell)
    ended = 0
    for noise in range(10):
        plain, stopped = run_all(
            engine,
            [request([5], noise=noise, max_tokens=60), request([5], noise=noise, max_tokens=60, stop=("d", "k."))],
        )
        text = spell(plain.ids[plain.ids != END].tolist())
        starts = [start for start in (text.find("d"), text.find("k.")) if start >= 0]
        if starts:
            ended += 1
            assert stopped.finish_reason == "stop"
            assert stopped.text == text[: min(starts)]
            assert stopped.ids.tolist() == plain.ids.tolist()[: len(stopped.ids)]
        else:
            assert stopped.text is None
    assert ended > 2


def test_cancelling_frees_the_slot_and_leaves_the_others_alone() -> None:
    model = make_model("qwen3")
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    engine = make_engine(model, max_slots=2)

    async def scenario() -> None:
        keep = asyncio.create_task(engine.generate(request([5, 6], max_tokens=40)))
        drop = asyncio.create_task(engine.generate(request([7, 8], max_tokens=200)))
        later = asyncio.create_task(engine.generate(request([9, 8], max_tokens=5)))
        for _ in range(30):
            await asyncio.sleep(0)
        drop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drop
        assert len((await later).ids) == 5
        assert len((await keep).ids) == 40

    asyncio.run(scenario())
    assert not engine._scheduler.busy
    expected = run_all(make_engine(make_model("qwen3")), [request([5, 6], max_tokens=3)])
    assert run_all(engine, [request([5, 6], max_tokens=3)])[0].ids.tolist() == expected[0].ids.tolist()


def test_cancelling_a_waiting_request() -> None:
    engine = make_engine(make_model("qwen3"), max_slots=1)

    async def scenario() -> None:
        first = asyncio.create_task(engine.generate(request([5, 6], max_tokens=20)))
        second = asyncio.create_task(engine.generate(request([7, 8], max_tokens=20)))
        await asyncio.sleep(0)
        second.cancel()
        await first
        with pytest.raises(asyncio.CancelledError):
            await second

    asyncio.run(scenario())
    assert not engine._scheduler.busy


def test_close_fails_what_is_running_and_what_comes_after() -> None:
    engine = make_engine(make_model("qwen3"))

    async def scenario() -> None:
        running = asyncio.create_task(engine.generate(request([5, 6], max_tokens=200)))
        for _ in range(20):
            await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request([5]))
        with pytest.raises(EngineError, match="closed"):
            await engine.load(1, {})

    asyncio.run(scenario())


class BreaksOnce:
    """A forward pass that fails at its third call, then works."""

    def __init__(self, inner: object) -> None:
        self.inner, self.calls = inner, 0

    def logits(self, *args: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("out of luck")
        return self.inner.logits(*args)


def test_a_failing_step_fails_all_in_flight_and_the_next_request_works() -> None:
    engine = make_engine(make_model("qwen3"), max_slots=2)
    expected = run_all(engine, [request([5, 6])])[0].ids.tolist()
    engine._stepper._forward = BreaksOnce(engine._stepper._forward)

    async def scenario() -> list[BaseException]:
        requests = [request(prompt_of(5, n), max_tokens=50) for n in range(4)]
        return await asyncio.gather(*(engine.generate(item) for item in requests), return_exceptions=True)

    for error in asyncio.run(scenario()):
        assert isinstance(error, EngineError)
        assert "out of luck" in str(error)
    assert run_all(engine, [request([5, 6])])[0].ids.tolist() == expected


def test_non_finite_logits_are_refused_and_do_not_linger() -> None:
    """A NaN in KV beneath a masked position would poison later rows: 0 * NaN is NaN."""
    engine = make_engine(make_model("qwen3"))
    weights = {name: tensor.clone() for name, tensor in make_model("qwen3").named_parameters()}
    expected = run_all(engine, [request(prompt_of(20, 1))])[0].ids.tolist()
    broken = {**weights, "model.layers.0.self_attn.v_proj.weight": torch.full((32, 32), torch.nan)}
    asyncio.run(engine.load(1, broken))
    with pytest.raises(EngineError, match="finite"):
        run_all(engine, [request(prompt_of(60, 1))])
    asyncio.run(engine.load(2, weights))
    for _ in range(2):
        assert run_all(engine, [request(prompt_of(20, 1))])[0].ids.tolist() == expected


def test_weights_are_loaded_after_a_call_at_a_temperature_near_0() -> None:
    engine = make_engine(make_model("qwen3"))
    with pytest.raises(EngineError, match="finite"):
        run_all(engine, [request(prompt_of(200, 1), temperature=1e-40)])
    asyncio.run(engine.load(1, {name: tensor.clone() for name, tensor in make_model("qwen3").named_parameters()}))
    assert run_all(engine, [request([5, 6], max_tokens=1)])[0].finish_reason in ("length", "stop")


def test_a_pool_that_grew_in_a_step_is_zeroed_outside_of_one() -> None:
    """As the next weights are loaded. Red on a device that is not the CPU when `zero_all` (kv.py) is not in inference
    mode, in which a step makes the tensors of a longer pool."""
    pool = KVPool(
        layout=KVLayout.uniform(1, 1, 4),
        dtype=torch.float32,
        device=torch.device("meta"),
        max_slots=2,
        max_length=4096,
        budget_bytes=1 << 30,
    )
    with torch.inference_mode():
        pool.resize(2, pool.longer(1024), kept=[5])
    pool.zero_all()
    pool.zero(0)


def test_the_loops_end_fails_what_is_in_flight() -> None:
    engine = make_engine(make_model("qwen3"))

    async def leave() -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.create_task(engine.generate(request([5, 6], max_tokens=200)))
        await asyncio.sleep(0.01)
        return task

    asyncio.run(leave())
    assert not engine._scheduler.busy
    assert len(run_all(engine, [request([5, 6], max_tokens=1)])[0].ids) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_tokens": 0},
        {"stop": ("x",)},
        {"stop": ("",)},
    ],
)
def test_impossible_sampling_is_refused(bad: dict[str, object]) -> None:
    engine = make_engine(make_model("qwen3"))
    with pytest.raises(SamplingError):
        run_all(engine, [request([5], **bad)])


@pytest.mark.parametrize(
    "bad",
    [{"stop": ("\ud800",)}, {"stop": ("x", "a\udc00")}, {"top_k": 2**70}, {"top_p": 1e-60}, {"temperature": 1e-60}],
)
def test_requests_that_would_break_a_step_are_refused(bad: dict[str, Any]) -> None:
    """All requests share one step. Red when `check_request` accepts the bad one: the other calls fail too (stop,
    top_k), or it is sampled greedily, or it fails with an engine's error."""
    engine = make_engine(make_model("qwen3"), stop_decoder=spell)

    async def main() -> list[Any]:
        wanted = [request([5], max_tokens=9), request([5], max_tokens=9, **bad), request([6], max_tokens=9)]
        return await asyncio.gather(*map(engine.generate, wanted), return_exceptions=True)

    first, refused, last = asyncio.run(main())
    assert isinstance(refused, SamplingError)
    assert isinstance(first, Generation)
    assert isinstance(last, Generation)


@pytest.mark.parametrize("prompt", [[], [-1], [97], [4, 2**31 - 1]])
def test_ids_outside_the_vocabulary_are_refused(prompt: list[int]) -> None:
    with pytest.raises(SamplingError, match=r"0 \.\. 96"):
        run_all(make_engine(make_model("qwen3")), [request(prompt)])


READS_PROC = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@READS_PROC
def test_a_pool_that_grows_takes_memory_for_the_slots_in_use() -> None:
    """Of 64 slots, two with content. Break: copy all slots in `resize`, or whole blocks of those that hold little, or
    (scheduler) count those that are empty."""
    layout, cpu = KVLayout.uniform(4, 8, 64), torch.device("cpu")
    pool = KVPool(layout=layout, dtype=torch.float32, device=cpu, max_slots=64, max_length=1024, budget_bytes=1 << 30)
    scheduler = Scheduler(pool)
    scheduler._resize(64, pool.length)
    before = resident()
    scheduler._resize(64, 1024)
    scheduler.table.kv_len_S[:2] = 7, 600
    for block in pool._blocks():
        block.keys_SKDT[:2] = block.values_SKTE[:2] = 3
    del block
    scheduler._resize(32, 1024)
    assert resident() - before < 0.1 * pool.num_bytes
    for layer in pool.layers.values():
        for slot, held in enumerate([64, 640, 0]):  # whole buckets
            values = torch.cat([block.values_SKTE[slot] for block in layer.blocks], dim=1)
            keys = torch.cat([block.keys_SKDT[slot].mT for block in layer.blocks], dim=1)
            assert bool((values[:, :held] == 3).all())
            assert not values[:, held:].any()
            assert torch.equal(keys, values)


@READS_PROC
def test_resting_gives_the_memory_of_the_cache_back() -> None:
    """Break: leave the allocation out of `KVPool.release`."""
    layout, cpu = KVLayout.uniform(4, 8, 64), torch.device("cpu")
    pool = KVPool(layout=layout, dtype=torch.float32, device=cpu, max_slots=32, max_length=512, budget_bytes=1 << 28)
    before = resident()
    for block in pool._blocks():
        block.keys_SKDT.fill_(1)
        block.values_SKTE.fill_(1)
    del block
    assert resident() - before > 0.9 * pool.num_bytes
    pool.release()
    assert resident() - before < 0.1 * pool.num_bytes
    assert not any(block.keys_SKDT.any() for block in pool._blocks())


def test_an_engine_that_rested_samples_the_same_and_one_with_calls_does_not_rest() -> None:
    """Break: in `rest` drop `forget_all`, so that the next call finds a prefix whose keys are gone; or do not ask
    whether calls run."""
    engine = make_engine(make_model("qwen3"))
    asked = request(prompt_of(40, 0), noise=3, max_tokens=12)
    (first,) = run_all(engine, [asked])

    async def twice() -> list[Generation]:
        await engine.rest()
        again = await engine.generate(asked)
        running, sampled = asyncio.create_task(engine.generate(asked)), engine.stats.sampled_tokens
        while engine.stats.sampled_tokens < sampled + 3:
            await asyncio.sleep(0)
        assert not running.done()
        await engine.rest()
        return [again, await running]

    for generation in asyncio.run(twice()):
        assert generation.ids.tolist() == first.ids.tolist()
        assert generation.logprobs.tolist() == pytest.approx(first.logprobs.tolist(), abs=1e-5)
