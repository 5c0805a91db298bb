"""Models with recurrent and convolution layers: right logprobs however a conversation is cut, copied, moved or lost;
and common beginnings computed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hybrid_toys import HYBRIDS, make_hybrid
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engines import make_engine, request, run_all, scored
from trainer_toys import VOCABULARY

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.embedded.attention import SlotSegment
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.embedded.mixing import pieces, single_pieces
from sharpen.errors import EngineError, ModelError
from sharpen.models.recurrent import mixers_of

REFERENCE = make_hybrid("qwen3_5_text")


def prompt_of(length: int, seed: int) -> list[int]:
    """Random ids, no special ones."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def assert_right(requests: Sequence[GenerateRequest], generations: Sequence[Generation], model: Any = None) -> None:
    for item, generation in zip(requests, generations, strict=True):
        expected = scored(model or REFERENCE, item.prompt_ids.tolist(), generation)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


def without_end(seed: int = 0) -> Any:
    model = make_hybrid("qwen3_5_text", seed=seed)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.config.max_position_embeddings = 512
    return model


def weights_of(seed: int) -> Mapping[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in without_end(seed).named_parameters()}


@pytest.mark.parametrize("family", HYBRIDS)
def test_logprobs_equal_a_full_forward_over_three_calls(family: str) -> None:
    """Prompts in chunks, then twice their continuations."""
    reference, engine = make_hybrid(family), make_engine(make_hybrid(family))
    engine._stepper.prompt_tokens_per_step = 61
    prompts = [prompt_of(length, length) for length in (1, 2, 9, 30, 65)]
    for call in range(3):
        requests = [request(prompt, max_tokens=3 + index % 4, noise=index) for index, prompt in enumerate(prompts)]
        generations = run_all(engine, requests)
        assert_right(requests, generations, reference)
        prompts = [
            [*prompt, *generation.ids.tolist(), *prompt_of(4, call)]
            for prompt, generation in zip(prompts, generations, strict=True)
        ]
    assert engine.stats.reused_tokens > engine.stats.computed_tokens / 2


def test_in_bfloat16_recurrent_states_are_kept_in_fp32() -> None:
    for family in ("qwen3_5_text", "bamba"):
        reference = make_hybrid(family, torch.bfloat16)
        engine = make_engine(make_hybrid(family, torch.bfloat16))
        requests = [request(prompt_of(length, length), noise=length, max_tokens=20) for length in (5, 40, 70)]
        differences = [
            (torch.tensor(generation.logprobs) - scored(reference, item.prompt_ids.tolist(), generation)).abs()
            for item, generation in zip(requests, run_all(engine, requests), strict=True)
        ]
        assert float(torch.cat(differences).mean()) < 0.05
        states = engine._scheduler.states
        assert states is not None
        assert {(key[0], tensor.dtype) for layer in states.pool.take(0) for key, tensor in layer.items()} == {
            ("recurrent", torch.float32),
            ("convolution", torch.bfloat16),
        }


def test_a_groups_prompt_is_computed_once() -> None:
    """Red when `Scheduler.computed` keeps no snapshot and members come later than the first one's last prompt token."""
    engine = make_engine(make_hybrid("qwen3_5_text"))
    requests = [request(prompt_of(50, 0), noise=n) for n in range(8)]
    assert_right(requests[:1], run_all(engine, requests[:1]))
    assert_right(requests[1:], run_all(engine, requests[1:]))
    assert engine.stats.computed_tokens == 49
    assert engine.stats.reused_tokens == 7 * 49


def test_a_common_system_prompt_is_computed_once() -> None:
    """Red when waiting jobs do not make the first one stop where they part (`_stop_at`)."""
    engine = make_engine(make_hybrid("qwen3_5_text"), max_slots=64)
    system = prompt_of(100, 0)
    requests = [
        request([*system, 3 + task, *prompt_of(19 + task, task + 1)], noise=4 * task + n)
        for task in range(6)
        for n in range(4)
    ]
    assert_right(requests, run_all(engine, requests))
    assert engine.stats.computed_tokens == 100 + sum(19 + task for task in range(6))


def test_a_place_where_two_prompts_part_is_kept_from_the_second_on() -> None:
    """The first job did not know; the second passes it and keeps its state; the third begins there."""
    engine = make_engine(make_hybrid("qwen3_5_text"))
    system = prompt_of(100, 0)
    requests = [request([*system, 3 + task, *prompt_of(20, task)], noise=task) for task in range(3)]
    counts = []
    for item in requests:
        before = engine.stats.computed_tokens
        assert_right([item], run_all(engine, [item]))
        counts.append(engine.stats.computed_tokens - before)
    assert counts == [120, 120, 20]


def test_the_next_call_computes_only_new_tokens() -> None:
    engine = make_engine(make_hybrid("qwen3_5_text"))
    first = [request(prompt_of(60, n), noise=n, max_tokens=6) for n in range(8)]
    generations = run_all(engine, first)
    before = engine.stats
    second = [
        request([*one.prompt_ids.tolist(), *g.ids.tolist(), *prompt_of(5, 50 + n)], noise=n)
        for n, (one, g) in enumerate(zip(first, generations, strict=True))
    ]
    assert_right(second, run_all(engine, second))
    # the last sampled token was never computed, so it is new too; the last of the prompt is a decoding row
    assert engine.stats.computed_tokens - before.computed_tokens == 8 * 5


def test_a_fork_from_an_earlier_prompt_begins_at_its_snapshot() -> None:
    """The next prompt does not go on with the answer, as where a template strips the thinking."""
    engine = make_engine(make_hybrid("qwen3_5_text"))
    prompt = prompt_of(60, 0)
    run_all(engine, [request(prompt, max_tokens=30)])
    before = engine.stats
    fork = request([*prompt, *prompt_of(10, 1)])
    assert_right([fork], run_all(engine, [fork]))
    assert engine.stats.reused_tokens - before.reused_tokens == 59
    assert engine.stats.computed_tokens - before.computed_tokens == 10


def test_growth_within_the_memory_bound_suspends_jobs_with_their_states() -> None:
    """Slots of 256 positions grow to 384, of which fewer fit; sparse slots are moved together. Red when
    `Scheduler._swap_many` leaves the states where they are."""
    engine = make_engine(without_end(), max_slots=512, max_model_len=512, kv_cache_mb=1)
    requests = [request(prompt_of(200, n), noise=n, max_tokens=80 if n % 4 else 9) for n in range(24)]
    assert_right(requests, run_all(engine, requests))
    assert engine.stats.computed_tokens + engine.stats.reused_tokens > 24 * 199  # some were placed twice
    states = engine._scheduler.states
    assert states is not None
    assert engine._scheduler.pool.length == 384
    assert 0 < len(states.snapshots) <= states.snapshots.capacity
    assert states.snapshot_bytes <= 2**18
    scratch = engine.stats.kv_cache_mb / (states.pool.num_slots + 1)
    assert engine.stats.kv_cache_mb - scratch + engine.stats.states_mb <= 1
    num_states = states.pool.num_slots + len(states.snapshots)
    assert engine.stats.states_mb * 2**20 == num_states * states.pool.bytes_per_slot


def test_trap_40_no_token_after_a_load_uses_an_old_state() -> None:
    """Red when `SlotStates.forget` keeps the snapshots: the same prompts come again after the load."""
    engine = make_engine(without_end())
    prompts = [prompt_of(length, length) for length in (5, 40, 70)]

    async def scenario() -> list[Generation]:
        tasks = [asyncio.create_task(engine.generate(request(p, max_tokens=30, noise=9))) for p in prompts]
        while engine.stats.sampled_tokens < 30:
            await asyncio.sleep(0)
        await engine.load(1, weights_of(1))
        generations = list(await asyncio.gather(*tasks))
        return generations + [await engine.generate(request(p, max_tokens=3, noise=8)) for p in prompts]

    models = [without_end(0), without_end(1)]
    generations = asyncio.run(scenario())
    assert [set(g.versions.tolist()) for g in generations] == [{0, 1}] * 3 + [{1}] * 3
    for prompt, generation in zip(prompts * 2, generations, strict=True):
        by_version = torch.stack([scored(model, prompt, generation) for model in models])
        expected = by_version.gather(0, torch.tensor(generation.versions, dtype=torch.long).unsqueeze(0))[0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


def test_a_nan_in_a_state_is_cleared() -> None:
    """Red when `SlotStates.forget` keeps the snapshots, or `settle` does not zero a state."""
    engine = make_engine(make_hybrid("qwen3_5_text"))
    item = request(prompt_of(40, 0))
    run_all(engine, [item])
    states = engine._scheduler.states
    assert states is not None
    with torch.inference_mode():
        for snapshot in states.snapshots._by_ids.values():
            for layer in snapshot.state:
                for tensor in layer.values():
                    tensor.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        run_all(engine, [item])
    for _ in range(2):
        assert_right([item], run_all(engine, [item]))


def test_the_deterministic_mode_refuses_by_name() -> None:
    with pytest.raises(ModelError, match=r"Lfm2ForCausalLM.*deterministic"):
        make_engine(make_hybrid("lfm2"), deterministic=True)


def test_closing_frees_the_states() -> None:
    engine = make_engine(make_hybrid("lfm2"))
    run_all(engine, [request(prompt_of(40, 0))])
    assert engine.stats.states_mb > 0
    asyncio.run(engine.close())
    assert engine.stats.states_mb == 0


def segments_of(spans: Sequence[tuple[int, int]]) -> list[SlotSegment]:
    """Segments by start and length, one behind the other."""
    row, segments = 0, []
    for slot, (start, length) in enumerate(spans):
        segments.append(SlotSegment(slot=slot, first_row=row, start=start, end=start + length))
        row += length
    return segments


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), max_size=8))
def test_pieces_cover_each_segment_once_and_in_order(spans: list[tuple[int, int]]) -> None:
    segments = segments_of(spans)
    for cut in (pieces(segments, chunk=1), pieces(segments, chunk=16), single_pieces(segments)):
        covered: dict[int, list[int]] = {}
        for piece in cut:
            for slot, first in zip(piece.slots, piece.first_rows, strict=True):
                covered.setdefault(slot, []).extend(range(first, first + piece.length))
        assert covered == {s.slot: list(range(s.first_row, s.first_row + s.end - s.start)) for s in segments}


@pytest.mark.parametrize(("chunk", "lengths"), [(1, [1, 2, 4, 8, 16, 32]), (64, [*range(20, 60)])])
def test_a_piece_shorter_than_a_chunk_costs_a_whole_one(chunk: int, lengths: list[int]) -> None:
    """Of 40 segments with lengths of their own, those of a convolution share few calls; a scan computes each alone.

    Break: `_cost` leaves the chunk out.
    """
    found = pieces(segments_of([(0, length) for length in range(20, 60)]), chunk)
    assert sorted(piece.length for piece in found) == lengths


def test_each_kind_of_layer_has_its_chunk() -> None:
    families = ("lfm2", "qwen3_5_text", "kimi_linear", "bamba")
    assert [mixers_of(make_hybrid(family))[0].chunk for family in families] == [1, 64, 64, 16]


Plan = list[tuple[int, int, int, int]]


def drive(engine: EmbeddedEngine, plan: Plan) -> None:
    """Conversations of two calls that share stems of few prompts, arriving at odd moments; some are cancelled, and
    weights are loaded in between."""
    models = [without_end(seed) for seed in range(2)]

    async def converse(index: int, stem: int, length: int, new: int) -> list[tuple[GenerateRequest, Generation]]:
        ids, pairs = prompt_of(80, stem)[:length], []
        for call in range(2):
            item = request(ids, noise=2 * index + call, max_tokens=new)
            pairs.append((item, await engine.generate(item)))
            ids = [*ids, *pairs[-1][1].ids.tolist(), *prompt_of(1 + new % 5, index)]
        return pairs

    async def scenario() -> None:
        tasks = []
        for index, (stem, length, new, wait) in enumerate(plan):
            task = asyncio.create_task(converse(index, stem, length, new))
            for _ in range(3 * wait):
                await asyncio.sleep(0)
            if wait == 13:
                task.cancel()
                await asyncio.wait([task])
            else:
                tasks.append(task)
            if wait == 7:
                await engine.load(engine.version + 1, weights_of((engine.version + 1) % 2))
        for task in tasks:
            for item, generation in await task:
                by_model = torch.stack([scored(m, item.prompt_ids.tolist(), generation) for m in models])
                expected = by_model.gather(0, torch.tensor(generation.versions % 2, dtype=torch.long).unsqueeze(0))[0]
                torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)

    asyncio.run(scenario())
    assert not engine._scheduler.busy


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 80), st.integers(1, 30), st.integers(0, 15)),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 10),
    st.integers(0, 6),
    st.sampled_from([5, 40, 2048]),
)
@settings(max_examples=8, deadline=None)
def test_any_arrival_order_gives_right_logprobs(plan: Plan, max_slots: int, num_snapshots: int, chunk: int) -> None:
    engine = make_engine(without_end(), max_slots=max_slots)
    engine._stepper.prompt_tokens_per_step = chunk
    assert engine._scheduler.states is not None
    engine._scheduler.states.snapshots.capacity = num_snapshots
    drive(engine, plan)
