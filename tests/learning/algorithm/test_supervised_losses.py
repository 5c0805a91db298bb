"""The losses of supervised training against plain implementations in fp64: order, split and padding do not matter."""

import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpen.learning.algorithm.supervised import cross_entropy, dpo, margins

logprob = st.floats(-4.0, -0.01)
# Its logprob now and before, on the better side or not, the number of its pair.
TOKENS = st.lists(st.tuples(logprob, logprob, st.booleans(), st.integers(0, 2)), min_size=1, max_size=10)
Tokens = list[tuple[float, float, bool, int]]


def loss_and_gradient(tokens: Tokens, beta: float) -> tuple[float, list[float]]:
    now, reference, better, pairs = (list(column) for column in zip(*tokens, strict=True))
    now_E = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    sides_E = torch.tensor([1.0 if side else -1.0 for side in better], dtype=torch.float64)
    of_pairs = margins(now_E, torch.tensor(reference, dtype=torch.float64), sides_E, torch.tensor(pairs), 3)
    loss = dpo(of_pairs, beta=beta).sum()
    loss.backward()
    assert now_E.grad is not None
    return float(loss.detach()), now_E.grad.tolist()


@given(TOKENS, st.floats(0.01, 2.0), st.randoms(use_true_random=False))
def test_dpo_equals_a_plain_implementation_in_any_order(tokens: Tokens, beta: float, random: Random) -> None:
    of_pairs = [sum((n - r) * (1 if better else -1) for n, r, better, p in tokens if p == pair) for pair in range(3)]
    losses = [math.log1p(math.exp(-beta * margin)) for margin in of_pairs]
    pulls = [-beta / (1 + math.exp(beta * margin)) for margin in of_pairs]
    gradients = [pulls[pair] * (1 if better else -1) for _, _, better, pair in tokens]
    loss, gradient = loss_and_gradient(tokens, beta)
    assert loss == pytest.approx(sum(losses), rel=1e-9)
    assert gradient == pytest.approx(gradients, rel=1e-9)
    order = random.sample(range(len(tokens)), len(tokens))
    loss, gradient = loss_and_gradient([tokens[place] for place in order], beta)
    assert loss == pytest.approx(sum(losses), rel=1e-9)
    assert gradient == pytest.approx([gradients[place] for place in order], rel=1e-9)


@given(TOKENS, st.floats(0.01, 2.0))
def test_exchanging_the_sides_of_a_pair_turns_its_margin_around(tokens: Tokens, beta: float) -> None:
    """`-log sigmoid(m)` and `-log sigmoid(-m)` differ by m."""
    exchanged = [(now, reference, not better, pair) for now, reference, better, pair in tokens]
    total = sum((now - reference) * (1 if better else -1) for now, reference, better, _ in tokens)
    difference = loss_and_gradient(exchanged, beta)[0] - loss_and_gradient(tokens, beta)[0]
    assert difference == pytest.approx(beta * total, rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(logprob, st.floats(0.0, 1.0)), min_size=2, max_size=8), st.data())
def test_cross_entropy_adds_over_any_split_and_does_not_see_padding(
    rows: list[tuple[float, float]], data: st.DataObject
) -> None:
    logprobs, weights = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    expected = -sum(value * weight for value, weight in rows)
    assert float(cross_entropy(logprobs, weights)) == pytest.approx(expected, abs=1e-12)
    cut = data.draw(st.integers(0, len(rows)))
    parts = cross_entropy(logprobs[:cut], weights[:cut]) + cross_entropy(logprobs[cut:], weights[cut:])
    assert float(parts) == pytest.approx(expected, abs=1e-12)
    padded = cross_entropy(torch.cat([logprobs, logprobs]), torch.cat([weights, torch.zeros_like(weights)]))
    assert float(padded) == pytest.approx(expected, abs=1e-12)
