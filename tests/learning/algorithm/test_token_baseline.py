"""The baseline of each token (`otb`): numbers worked out by hand, those of verl's code, and what does not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpen.evidence.certificate.plain.credit import Credit, less_baselines, squared_norms
from sharpen.learning.algorithm.token_baseline import energies, less_baseline, sum_of_squares

ROLLOUTS = st.lists(
    st.tuples(
        st.integers(-8, 8).map(float), st.lists(st.integers(1, 64).map(lambda n: n / 32), min_size=1, max_size=5)
    ),
    min_size=1,
    max_size=6,
)


def found(groups: list[list[tuple[float, list[float]]]]) -> list[list[float]]:
    """The advantages of each rollout's tokens, whose reward and energies are given."""
    members = [member for group in groups for member in group]
    lengths = [len(of_tokens) for _, of_tokens in members]
    advantages_S = less_baseline(
        np.repeat([reward for reward, _ in members], lengths),
        np.concatenate([of_tokens for _, of_tokens in members]),
        np.repeat(np.arange(len(members)), lengths),
        np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
    )
    return [part.tolist() for part in np.split(advantages_S, np.cumsum(lengths)[:-1])]


def by_certificate(groups: list[list[tuple[float, list[float]]]]) -> list[list[float]]:
    """The same by the certificate's formula, the first token in a call of its own."""
    credits, owners, norms = [], [], []
    for number, group in enumerate(groups):
        for place, (reward, of_tokens) in enumerate(group):
            for part in (of_tokens[:1], of_tokens[1:]):
                norms_S = torch.tensor(part, dtype=torch.float64)
                nothing_S = torch.zeros_like(norms_S)
                credits.append(
                    Credit(
                        advantages_S=nothing_S + reward,
                        divergence_S=nothing_S,
                        returns_S=nothing_S,
                        values_S=nothing_S,
                    )
                )
                owners.append((f"g{number}", f"{number}/{place}"))
                norms.append(norms_S)
    made = [credit.advantages_S.tolist() for credit in less_baselines(credits, owners, norms)]
    return [first + rest for first, rest in zip(made[::2], made[1::2], strict=True)]


@pytest.mark.parametrize("formula", [found, by_certificate])
def test_advantages_by_hand(formula) -> None:
    """W of the first rollout 0.5, 1; of the second 1.5, 2, 2.5. Baselines 0.5 / 2, then 1 / 3, then the second's own
    reward. A group beside it is compared with itself."""
    first, second, other = formula([[(1.0, [0.5, 0.5]), (0.0, [1.5, 0.5, 0.5])], [(8.0, [1.0])]])
    assert first == pytest.approx([0.75, 2 / 3])
    assert second == pytest.approx([-0.25, -1 / 3, 0.0])
    assert other == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize("formula", [found, by_certificate])
def test_numbers_of_verl(formula) -> None:
    """What `compute_multi_turn_optimal_token_baseline_advantage` of verl's `core_algos.py` (2026) returned in float64
    for these probabilities and sums of squares, with `handle_zero_tail=False`; with True the last token of the first
    and of the last rollout has its whole reward, 1 and -1."""
    tokens = [
        [
            (1.0, [(0.5, 0.4), (0.9, 0.82), (0.8, 0.66)]),
            (0.0, [(0.6, 0.44), (0.7, 0.55)]),
            (0.5, [(0.2, 0.35), (0.95, 0.91)]),
        ],
        [(2.0, [(0.5, 0.5), (0.5, 0.5)]), (-1.0, [(0.9, 0.82), (0.1, 0.5), (0.3, 0.34)])],
    ]
    groups = [
        [(reward, [1 - 2 * p + squares for p, squares in of_rollout]) for reward, of_rollout in group]
        for group in tokens
    ]
    expected = [
        [0.449685538, 0.491525413, 0.0],
        [-0.550314462, -0.508474587],
        [-0.050314462, -0.008474587],
        [0.115384652, 1.706896553],
        [-2.884615348, -1.293103447, 0.0],
    ]
    for mine, theirs in zip(formula(groups), expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-7)


@given(groups=st.lists(ROLLOUTS, min_size=1, max_size=3))
def test_both_formulas_agree_and_the_weighted_mean_of_each_place_is_zero(
    groups: list[list[tuple[float, list[float]]]],
) -> None:
    advantages = found(groups)
    for mine, other in zip(advantages, by_certificate(groups), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-9)
    rest = iter(advantages)
    for group in groups:
        own = [(np.cumsum(tokens), next(rest)) for _, tokens in group]
        for place in range(max(len(weights) for weights, _ in own)):
            here = [weights[place] * mine[place] for weights, mine in own if place < len(mine)]
            assert sum(here) == pytest.approx(0.0, abs=1e-6)


@given(group=ROLLOUTS, shift=st.integers(-4, 4).map(float))
def test_what_is_added_to_all_rewards_of_a_group_changes_nothing(
    group: list[tuple[float, list[float]]], shift: float
) -> None:
    """So the trainer may begin with the reward less the group's mean."""
    shifted = [(reward + shift, tokens) for reward, tokens in group]
    for mine, other in zip(found([group]), found([shifted]), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@given(rewards=st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=6), length=st.integers(1, 4))
def test_equal_weights_give_the_mean_and_equal_rewards_nothing(rewards: list[float], length: int) -> None:
    mean = float(np.mean(rewards))
    for mine, reward in zip(found([[(reward, [0.5] * length) for reward in rewards]]), rewards, strict=True):
        assert mine == pytest.approx([reward - mean] * length, abs=1e-6)
    weights = np.arange(1, len(rewards) + 1) / 4
    for mine in found([[(rewards[0], [weight] * length) for weight in weights]]):
        assert mine == pytest.approx([0.0] * length, abs=1e-6)


def test_where_all_tokens_were_certain_the_baseline_is_that_of_the_group() -> None:
    """Returns that are centred already stay what they are."""
    first, second = found([[(0.5, [0.0, 1.0]), (-0.5, [0.0, 3.0])]])
    assert first == pytest.approx([0.5, 0.75])
    assert second == pytest.approx([-0.5, -0.25])


@given(logits=st.lists(st.floats(-8, 8), min_size=2, max_size=6))
def test_the_energy_of_a_token_is_the_squared_norm_of_its_gradient(logits: list[float]) -> None:
    """By autograd; an id that may not be sampled has none."""
    allowed = torch.tensor([*logits, -1e9], dtype=torch.float64, requires_grad=True)
    logprobs_V = allowed.log_softmax(-1)
    logprobs_V[1].backward()
    norm = allowed.grad.square().sum()
    logprobs_RV = logprobs_V.detach()[None]
    energy_E = energies(logprobs_RV[:, 1], sum_of_squares(logprobs_RV))
    torch.testing.assert_close(energy_E[0], norm, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(squared_norms(logprobs_RV, torch.tensor([1]))[0], norm, atol=1e-12, rtol=1e-9)
