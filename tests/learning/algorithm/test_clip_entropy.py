"""Which tokens keep their advantage: numbers by hand, a plain implementation, and what must not matter."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import LossConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.clip_entropy import (
    clip_by_batch,
    clip_by_vocabulary,
    discriminator,
    mean_discriminator,
)
from sharpen.learning.algorithm.resolve import resolve

ZEROS = np.zeros(5)


def test_the_discriminator_by_hand():
    """(0.9, 0.1) has entropy 0.3250830: S is 0.9 (0.3250830 - 0.1053605) = 0.1977502 and the opposite for the other;
    its mean is 0.9 x 0.1977502 - 0.1 x 0.1977502 = 0.1582002. Equal probabilities have S = 0."""
    p = np.array([0.9, 0.1])
    entropy = -(p * np.log(p)).sum()
    np.testing.assert_allclose(discriminator(np.log(p), np.full(2, entropy)), [0.1977502, -0.1977502], atol=1e-7)
    rows = torch.tensor([[0.9, 0.1], [0.5, 0.5]], dtype=torch.float64).log()
    np.testing.assert_allclose(mean_discriminator(rows).numpy(), [0.1582002, 0.0], atol=1e-7)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.integers(0, 5))
def test_the_discriminator_is_how_fast_raising_a_logit_lowers_the_entropy(logits, place):
    """Theorem 3.2 of arXiv 2602.03392, by automatic differentiation."""
    k = place % len(logits)
    logits_V = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs_V = logits_V.log_softmax(0)
    entropy = -(logprobs_V.exp() * logprobs_V).sum()
    entropy.backward()
    assert logits_V.grad is not None
    found = discriminator(logprobs_V[k].detach().numpy(), entropy.detach().numpy())
    assert float(found) == pytest.approx(-float(logits_V.grad[k]), abs=1e-12)


def test_clip_by_batch_by_hand():
    """With p = 1, S is the entropy given: 1, 1, 1, 1, -4 have mean 0 and deviation 2, so the bound is -2 mu."""
    found_S = np.array([1.0, 1, 1, 1, -4])
    down = np.full(5, -1.0)
    assert clip_by_batch(down, ZEROS, found_S, ZEROS, mu=1.9).tolist() == [True] * 4 + [False]
    assert clip_by_batch(down, ZEROS, found_S, ZEROS, mu=2.1).all()
    assert clip_by_batch(down, ZEROS, found_S, ZEROS).all()  # mu is 2.5
    assert clip_by_batch(-down, ZEROS, found_S, ZEROS, mu=0.1).all()  # pushed up: kept
    assert clip_by_batch(down, ZEROS, np.full(5, 3.0), ZEROS, mu=0.1).all()  # all the same
    assert clip_by_batch(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0)).tolist() == []


def test_clip_by_vocabulary_by_hand():
    """With p = 1 and entropy 0, S is 0 and the means are how far below them it is: 8, 6 and eight times 0 have mean 1.4
    and deviation sqrt(100 / 10 - 1.96) = 2.8355, so the bound at mu 2 is 5.671."""
    zeros, below = np.zeros(10), np.array([8.0, 6] + [0.0] * 8)
    down = np.full(10, -1.0)

    def left_out(advantages, **arguments):
        return np.flatnonzero(~clip_by_vocabulary(advantages, zeros, zeros, below, **arguments)).tolist()

    assert left_out(down, mu=2.0, max_frac=0.2) == [0, 1]
    assert left_out(down, mu=2.0, max_frac=0.1) == [0]
    assert left_out(down, mu=2.0) == [0]  # max_frac 1e-4 of ten tokens: one
    assert left_out(down, mu=2.2, max_frac=0.2) == [0]
    assert left_out(down) == []  # mu 8.5
    assert left_out(np.array([1.0] + [-1.0] * 9), mu=2.0, max_frac=0.2) == [1]


def plain(name, tokens, mu, max_frac):
    """Loops over plain floats, written without the module. A token is (advantage, logprob, entropy, mean)."""
    values = [math.exp(logprob) * (entropy + logprob) for _, logprob, entropy, _ in tokens]
    if name == "clipb":
        average = statistics.fmean(values)
        below = [average - value for value in values]
    else:
        below = [token[3] - value for token, value in zip(tokens, values, strict=True)]
    bound = mu * statistics.pstdev(below)
    out = [i for i, token in enumerate(tokens) if token[0] < 0 and bound > 1e-11 and below[i] > bound]
    if name == "clipv":
        out = sorted(out, key=lambda i: -below[i])[: max(int(max_frac * len(tokens)), 1)]
    return [i not in out for i in range(len(tokens))]


def kept(name, tokens, mu, max_frac):
    columns = [np.array(column, np.float64) for column in zip(*tokens, strict=True)]
    if name == "clipb":
        return clip_by_batch(*columns, mu=mu).tolist()
    return clip_by_vocabulary(*columns, mu=mu, max_frac=max_frac).tolist()


TOKENS = st.lists(
    st.tuples(st.sampled_from([-1.5, -0.25, 0.0, 1.0]), st.floats(-6, -0.01), st.floats(0.01, 4), st.floats(-1, 1)),
    min_size=1,
    max_size=30,
    unique_by=(lambda token: token[1], lambda token: token[3]),
)
NAMES = pytest.mark.parametrize("name", ["clipb", "clipv"])
MU = st.floats(0.3, 3.0)
MAX_FRAC = st.sampled_from([1e-4, 0.1, 0.5, 1.0])


@NAMES
@given(tokens=TOKENS, mu=MU, max_frac=MAX_FRAC)
def test_both_equal_a_plain_implementation(name, tokens, mu, max_frac):
    assert kept(name, tokens, mu, max_frac) == plain(name, tokens, mu, max_frac)


@NAMES
@given(tokens=TOKENS, mu=MU, max_frac=MAX_FRAC, data=st.data())
def test_the_order_of_tokens_and_the_scale_of_advantages_do_not_matter(name, tokens, mu, max_frac, data):
    order = data.draw(st.permutations(range(len(tokens))))
    found = kept(name, tokens, mu, max_frac)
    assert kept(name, [tokens[i] for i in order], mu, max_frac) == [found[i] for i in order]
    assert kept(name, [(7 * token[0], *token[1:]) for token in tokens], mu, max_frac) == found


@given(tokens=TOKENS, mu=MU)
def test_duplicated_tokens_are_treated_alike(tokens, mu):
    assert kept("clipb", tokens * 2, mu, 1.0) == kept("clipb", tokens, mu, 1.0) * 2


@NAMES
@given(tokens=TOKENS, mu=MU, max_frac=MAX_FRAC)
def test_only_tokens_that_are_pushed_down_lose_anything_and_not_too_many(name, tokens, mu, max_frac):
    found = kept(name, tokens, mu, max_frac)
    assert all(keeps or token[0] < 0 for keeps, token in zip(found, tokens, strict=True))
    if name == "clipv":
        assert found.count(False) <= max(int(max_frac * len(tokens)), 1)


def test_they_are_chosen_by_name_with_their_arguments():
    algorithm = resolve("dr_grpo", LossConfig(advantage="clipv", advantage_args={"mu": 2.0, "max_frac": 0.2}), 4)
    assert algorithm.clips_by_entropy
    assert algorithm.trains_zero_advantages  # every token counts in the statistics
    assert algorithm.centred
    zeros, below = np.zeros(10), np.array([8.0, 6] + [0.0] * 8)
    assert algorithm.keeps_advantage(np.full(10, -1.0), zeros, zeros, below).sum() == 8
    assert not resolve("grpo", LossConfig(), 4).clips_by_entropy
    with pytest.raises(ConfigError, match=r"max_frac has no effect in 'grpo': its advantage 'clipb' takes mu"):
        resolve("grpo", LossConfig(advantage="clipb", advantage_args={"max_frac": 0.2}), 4)
