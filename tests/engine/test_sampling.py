"""Sampling by hand-computed numbers and by counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engines import VOCAB, full_logits, make_engine, make_model, request, run_all

from sharpen.engine.embedded.sampling import SamplingRows, sample, truncated_log_softmax, uniforms


def rows(uniform: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingRows:
    count = len(uniform)
    return SamplingRows(
        uniform_R=torch.tensor(uniform, dtype=torch.float64),
        temperature_R=torch.full((count,), temperature),
        top_p_R=torch.full((count,), top_p),
        top_k_R=torch.full((count,), top_k),
        min_p_R=torch.zeros(count),
    )


def chi_square_is_plausible(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Whether a chi-square test gives p > 0.001 (Wilson and Hilferty's normal approximation)."""
    few = expected < 5
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    if expected[-1] == 0:
        assert counts[-1] == 0
        counts, expected = counts[:-1], expected[:-1]
    degrees = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    return z < 3.09


def test_the_token_is_where_the_cumulative_distribution_passes_the_uniform() -> None:
    logits = torch.tensor([0.1, 0.0, 0.6, 0.3]).log().expand(6, 4)
    drawn = sample(logits, rows([0.0, 0.0999, 0.1001, 0.6999, 0.7001, 1 - 2**-52]))
    assert drawn.ids_R.tolist() == [0, 0, 2, 2, 3, 3]  # id 1 has probability 0
    assert drawn.logprobs_R.exp().tolist() == pytest.approx([0.1, 0.1, 0.6, 0.6, 0.3, 0.3])


def test_a_large_vocabulary_is_drawn_by_blocks_of_ids() -> None:
    """Two blocks and 8 ids: id 10 has 1/4, the second block has nothing, the last id has 3/4."""
    logits = torch.full((4, 8200), -torch.inf)
    logits[:, 10], logits[:, 8199] = math.log(0.25), math.log(0.75)
    drawn = sample(logits, rows([0.0, 0.2499, 0.2501, 1 - 2**-52]))
    assert drawn.ids_R.tolist() == [10, 10, 8199, 8199]
    assert drawn.logprobs_R.exp().tolist() == pytest.approx([0.25, 0.25, 0.75, 0.75])


def test_blocks_change_no_draw() -> None:
    """The same ids as by adding up the whole vocabulary in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 9000, generator=generator) * 3
    uniform = torch.rand(300, generator=generator, dtype=torch.float64)
    cdf = torch.log_softmax(logits, -1).double().exp().cumsum(-1)
    expected = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0]
    assert sample(logits, rows(uniform.tolist())).ids_R.tolist() == expected.tolist()


def test_a_row_that_is_not_finite_draws_an_id_of_the_vocabulary() -> None:
    logits = torch.full((1, 8200), torch.nan)
    drawn = sample(logits, rows([0.999]))
    assert 0 <= int(drawn.ids_R) < 8200
    assert not torch.isfinite(drawn.logprobs_R).any()


def test_temperature_two_takes_square_roots() -> None:
    logits = torch.tensor([[0.64, 0.36]]).log()
    assert sample(logits, rows([0.0], temperature=2.0)).logprobs_R.exp().tolist() == pytest.approx([0.8 / 1.4])


def test_greedy_reports_the_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.3, 0.5, 0.2]]).log()
    drawn = sample(logits, rows([0.99], temperature=0.0))
    assert drawn.ids_R.tolist() == [1]
    assert drawn.logprobs_R.exp().tolist() == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p", "kept"),
    [
        (1.0, 2, 0.0, {1: 5 / 8, 2: 3 / 8}),
        (0.5, 0, 0.0, {1: 1.0}),
        (0.51, 0, 0.0, {1: 5 / 8, 2: 3 / 8}),
        (0.01, 0, 0.0, {1: 1.0}),
        (0.6, 2, 0.0, {1: 1.0}),
        (0.63, 2, 0.0, {1: 5 / 8, 2: 3 / 8}),
        (1.0, 0, 0.59, {1: 5 / 8, 2: 3 / 8}),
        (1.0, 0, 0.61, {1: 1.0}),
        (1.0, 0, 0.29, {0: 15 / 95, 1: 50 / 95, 2: 30 / 95}),
        (1.0, 0, 1.0, {1: 1.0}),
        (1.0, 2, 0.29, {1: 5 / 8, 2: 3 / 8}),
        (0.6, 0, 0.59, {1: 1.0}),  # of the mass of what min_p leaves; of all 4 it would be {1, 2}
    ],
)
def test_truncation(top_p: float, top_k: int, min_p: float, kept: dict[int, float]) -> None:
    logits = torch.tensor([[0.15, 0.5, 0.3, 0.05]]).log()
    cut = torch.tensor([top_p]), torch.tensor([top_k]), torch.tensor([min_p])
    (row,) = truncated_log_softmax(logits, *cut).exp().tolist()
    assert row == pytest.approx([kept.get(token, 0.0) for token in range(4)])


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
@settings(max_examples=100)
def test_noise_is_a_function_of_key_and_position(key: int, position: int) -> None:
    alone = uniforms(np.array([key], np.uint64), np.array([position]))
    among = uniforms(np.array([3, key, 5], np.uint64), np.array([7, position, 1]))
    assert alone[0] == among[1]
    assert 0.0 <= alone[0] <= 1 - 2**-52


@pytest.mark.parametrize("axis", ["keys", "positions"])
def test_noise_is_uniform_over_keys_and_over_positions(axis: str) -> None:
    index = np.arange(20_000)
    fixed = np.full(20_000, 12345)
    drawn = uniforms(*((index.astype(np.uint64), fixed) if axis == "keys" else (fixed.astype(np.uint64), index)))
    counts = np.bincount((drawn * 100).astype(int), minlength=100)
    assert chi_square_is_plausible(counts, np.full(100, 200.0))
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("settings_", [{}, {"temperature": 0.7}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.1}])
def test_sampled_tokens_follow_the_models_distribution(settings_: dict[str, float]) -> None:
    engine = make_engine(make_model("qwen3"), max_slots=256)
    prompt = [5, 6, 7]
    count = 3000
    generations = run_all(engine, [request(prompt, noise=noise, max_tokens=1, **settings_) for noise in range(count)])
    counts = np.bincount([int(generation.ids[0]) for generation in generations], minlength=VOCAB)
    logits = full_logits(make_model("qwen3"), prompt)[-1:] / settings_.get("temperature", 1.0)
    cut = settings_.get("top_p", 1.0), int(settings_.get("top_k", 0)), settings_.get("min_p", 0.0)
    expected = truncated_log_softmax(logits, *(torch.tensor([one]) for one in cut))[0].exp().numpy()
    assert chi_square_is_plausible(counts, expected * count)


def test_a_requests_noise_does_not_depend_on_its_neighbours() -> None:
    alone = run_all(make_engine(make_model("llama")), [request([5, 6], noise=77, max_tokens=20)])[0]
    crowd = [request([3, n], noise=n, max_tokens=3 + n % 20) for n in range(3, 20)]
    among = run_all(make_engine(make_model("llama")), [*crowd, request([5, 6], noise=77, max_tokens=20)])[-1]
    assert among.ids.tolist() == alone.ids.tolist()
