"""Slots: shared tokens are computed once, memory stays within its bound, and no move mixes up anybody's KV."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engines import FAMILIES, make_engine, make_model, prompt_of, request, run_all, scored

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.embedded.batch import shared_prefixes
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.embedded.slots import SlotTable

REFERENCE = make_model("qwen3")


def assert_right(requests: list[GenerateRequest], generations: list[Generation]) -> None:
    for item, generation in zip(requests, generations, strict=True):
        expected = scored(REFERENCE, item.prompt_ids.tolist(), generation)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


def test_a_groups_prompt_is_computed_once() -> None:
    engine = make_engine(make_model("qwen3"))
    requests = [request(prompt_of(50, 0), noise=n) for n in range(8)]
    assert_right(requests, run_all(engine, requests))
    assert engine.stats.computed_tokens == 50
    assert engine.stats.reused_tokens == 7 * 49


def test_a_common_system_prompt_is_computed_once() -> None:
    engine = make_engine(make_model("qwen3"), max_slots=64)
    system = prompt_of(100, 0)
    requests = [
        request(system + prompt_of(20 + task, task + 1), noise=8 * task + n) for task in range(6) for n in range(8)
    ]
    assert_right(requests, run_all(engine, requests))
    assert engine.stats.computed_tokens == 100 + sum(20 + task for task in range(6))


def test_rows_read_once_what_they_have_in_common_and_compute_the_same() -> None:
    """Of a cache in blocks: a system prompt, prompts of groups, and second calls that come back to their slots. Break:
    in `SlotAttention` read common keys from one position later."""
    cls, config = FAMILIES["qwen3"]()
    config.head_dim = 128
    torch.manual_seed(0)
    model = cls(config).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    engine, reference = make_engine(model, max_model_len=512), copy.deepcopy(model)
    system = prompt_of(150, 0)
    requests = [
        request(system + prompt_of(110 + task, task + 1), noise=8 * task + n, max_tokens=20)
        for task in range(2)
        for n in range(8)
    ]
    for call in range(2):
        generations = run_all(engine, requests)
        for item, generation in zip(requests, generations, strict=True):
            expected = scored(reference, item.prompt_ids.tolist(), generation)
            torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)
        requests = [
            request([*one.prompt_ids.tolist(), *g.ids.tolist(), *prompt_of(5, 50 + n)], noise=n + call, max_tokens=20)
            for n, (one, g) in enumerate(zip(requests, generations, strict=True))
        ]


@given(
    ids_ST=st.lists(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=3, max_size=3), min_size=1, max_size=7),
    kv_len_S=st.lists(st.integers(1, 190), min_size=7, max_size=7),
    adapter_S=st.lists(st.sampled_from([0, 0, 1]), min_size=7, max_size=7),
    worth=st.sampled_from([1, 100, 200]),
)
def test_what_slots_have_in_common(
    ids_ST: list[list[int]], kv_len_S: list[int], adapter_S: list[int], worth: int
) -> None:
    """Runs of 64 ids. Prefixes of a row follow on each other, are of equal ids of one adapter that have KV, and save
    what is asked for; no two rows have more in common beyond theirs that would."""
    count = len(ids_ST)
    table = SlotTable()
    table.resize(count, 192)
    table.ids_ST[:, :192] = np.array(ids_ST).repeat(64, axis=1)
    table.kv_len_S[:], table.adapter_S[:] = kv_len_S[:count], adapter_S[:count]
    covered = dict.fromkeys(range(count), 0)
    for one in shared_prefixes(table, np.arange(count), worth):
        rows = list(one.rows)
        assert {covered[row] for row in rows} == {one.first}
        assert one.end % 64 == 0
        assert (one.end - one.first) * (len(rows) - 1) >= worth
        assert len({(adapter_S[row], *table.ids_ST[row, : one.end].tolist()) for row in rows}) == 1
        assert min(kv_len_S[row] for row in rows) >= one.end
        covered |= dict.fromkeys(rows, one.end)
    for row in range(count):
        for other in range(row):
            length = min(kv_len_S[row], kv_len_S[other])
            same_T = table.ids_ST[row, :length] == table.ids_ST[other, :length]
            common = len(same_T) if same_T.all() else int(same_T.argmin())
            if adapter_S[row] == adapter_S[other] and covered[row] == covered[other]:
                assert common // 64 * 64 - covered[row] < max(worth, 64)


def test_the_next_call_computes_only_new_tokens() -> None:
    engine = make_engine(make_model("qwen3"))
    first = [request(prompt_of(60, n), noise=n, max_tokens=6) for n in range(8)]
    generations = run_all(engine, first)
    before = engine.stats
    second = [
        request([*one.prompt_ids.tolist(), *g.ids.tolist(), *prompt_of(5, 50 + n)], noise=n)
        for n, (one, g) in enumerate(zip(first, generations, strict=True))
    ]
    assert_right(second, run_all(engine, second))
    # the last sampled token's KV was never computed, so it is new too
    assert engine.stats.computed_tokens - before.computed_tokens == 8 * 6


def test_more_requests_than_slots() -> None:
    engine = make_engine(make_model("qwen3"), max_slots=3)
    requests = [request(prompt_of(5 + n, n), noise=n, max_tokens=2 + n % 7) for n in range(20)]
    assert_right(requests, run_all(engine, requests))


def test_growth_within_a_memory_bound_suspends_the_youngest() -> None:
    """2 layers x 2 x 2 heads x 16 x 4 bytes = 512 bytes a position: 1 MB is 8 slots of 256, or 4 of 512."""
    model = make_model("qwen3")
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    engine = make_engine(model, max_slots=32, max_model_len=512, kv_cache_mb=1)
    requests = [request(prompt_of(200, n), noise=n, max_tokens=80 if n % 2 else 20) for n in range(8)]
    generations = run_all(engine, requests)
    assert_right(requests, generations)
    assert [len(g.ids) for g in generations] == [20, 80] * 4
    assert engine.stats.kv_cache_mb <= 1.3  # one scratch slot more than the bound


def test_sparse_slots_are_compacted() -> None:
    model = make_model("qwen3")
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    engine = make_engine(model, max_slots=64)
    requests = [request(prompt_of(10 + n, n), noise=n, max_tokens=60 if n % 8 == 7 else 3) for n in range(64)]

    async def scenario() -> list[Generation]:
        tasks = [asyncio.create_task(engine.generate(item)) for item in requests]
        while engine.stats.steps < 20:
            await asyncio.sleep(0)
        assert np.flatnonzero(engine._scheduler.table.active_S).max() < 16
        return list(await asyncio.gather(*tasks))

    assert_right(requests, asyncio.run(scenario()))


def test_slots_of_agents_that_come_back_are_not_moved_for_a_few_steps() -> None:
    """Sixteen conversations of 100 tokens in two halves that take turns. Whoever moves slots as soon as they are sparse
    moves the upper half down and up again in each turn: some 8 x 100 positions twice, in place of 16 rows x 3 steps."""
    model = make_model("qwen3")
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    engine = make_engine(model, max_slots=64, max_model_len=512)
    histories = [prompt_of(100, n) for n in range(16)]

    def call(number: int) -> GenerateRequest:
        return request(histories[number], noise=number, max_tokens=3)

    def turn(numbers: range) -> None:
        for number, generation in zip(numbers, run_all(engine, [call(number) for number in numbers]), strict=True):
            histories[number] = [*histories[number], *generation.ids.tolist(), 1]

    turn(range(16))
    for _ in range(4):
        turn(range(8, 16))
        turn(range(8))
    assert engine._scheduler.moved_positions == 0


def drive(engine: EmbeddedEngine, plan: list[tuple[int, int, int, int]]) -> None:
    """Requests that share stems of few prompts, arriving at odd moments; some are cancelled."""

    async def scenario() -> None:
        pairs = []
        for index, (stem, length, new, wait) in enumerate(plan):
            item = request(prompt_of(80, stem)[:length], noise=index, max_tokens=new)
            task = asyncio.create_task(engine.generate(item))
            for _ in range(wait):
                await asyncio.sleep(0)
            if wait == 13:
                task.cancel()
                await asyncio.wait([task])
            else:
                pairs.append((item, task))
        assert_right([item for item, _ in pairs], [await task for _, task in pairs])

    asyncio.run(scenario())
    assert not engine._scheduler.busy


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 80), st.integers(1, 40), st.integers(0, 30)),
        min_size=1,
        max_size=14,
    ),
    st.integers(1, 12),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_arrival_order_gives_right_logprobs(
    plan: list[tuple[int, int, int, int]], max_slots: int, deterministic: bool
) -> None:
    drive(make_engine(make_model("qwen3"), max_slots=max_slots, deterministic=deterministic), plan)
