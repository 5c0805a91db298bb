"""The expert's part: its weight over the steps, its loss, and what is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.public import DatasetConfig
from sharpen.config.run import ExpertConfig, LossConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.expert import Expert, configured
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.algorithm.resolve import resolve

ROWS = DatasetConfig(path="rows.jsonl")
LOGPROBS = st.lists(st.floats(-30.0, -1e-6), min_size=1, max_size=20)


def test_the_weight_rises_then_falls_along_a_cosine():
    """By hand: 0.5 reached in step 4; over 4 more steps to 0.1, where cos(π k / 4) is √2/2, 0, -√2/2, -1."""
    expert = Expert(mu=0.5, mu_valley=0.1, mu_warmup_steps=4, mu_decay_steps=4)
    assert [expert.weight(step) for step in range(1, 11)] == pytest.approx(
        [0.125, 0.25, 0.375, 0.5, 0.44142136, 0.3, 0.15857864, 0.1, 0.1, 0.1]
    )


@pytest.mark.parametrize(
    ("expert", "expected"),
    [
        (Expert(mu=0.1), [0.1, 0.1, 0.1]),
        (Expert(mu=0.3, mu_warmup_steps=2), [0.15, 0.3, 0.3]),
        (Expert(mu=0.3, mu_valley=0.2, mu_warmup_steps=1, mu_decay_steps=0), [0.2, 0.2, 0.2]),
        (Expert(mu=1.0, mu_valley=0.0, mu_decay_steps=2), [0.5, 0.0, 0.0]),
        (Expert(mu=0.2, mu_valley=0.6, mu_decay_steps=2), [0.4, 0.6, 0.6]),
    ],
)
def test_parts_of_the_schedule_may_be_absent(expert, expected):
    assert [expert.weight(step) for step in (1, 2, 3)] == pytest.approx(expected)


@given(
    mu=st.floats(0, 1),
    valley=st.floats(0, 1),
    warmup=st.integers(0, 9),
    decay=st.integers(0, 9),
    step=st.integers(1, 30),
)
def test_the_weight_stays_within_its_bounds_and_ends_in_the_valley(mu, valley, warmup, decay, step):
    expert = Expert(mu=mu, mu_valley=valley, mu_warmup_steps=warmup, mu_decay_steps=decay)
    assert -1e-12 <= expert.weight(step) <= max(mu, valley) + 1e-12
    if step >= warmup + decay:
        assert expert.weight(step) == valley


def test_token_losses_by_hand():
    """p = 1/2: -log p = 0.693147, times 1/4 with phi. p = 9/10: 0.105361, times 0.09. p = 1/100: 4.605170, x 0.0099."""
    logprobs_E = torch.tensor([0.5, 0.9, 0.01], dtype=torch.float64).log()
    plain = [0.69314718, 0.10536052, 4.60517019]
    assert Expert().token_losses(logprobs_E).tolist() == pytest.approx(plain)
    assert Expert(phi=True).token_losses(logprobs_E).tolist() == pytest.approx([0.17328680, 0.00948245, 0.04559118])


def plain_gradient(logprob: float, phi: bool) -> float:
    """-1 or, with phi, -p (1 - p): what the loss's derivative by the logprob is if the weight is a constant."""
    p = math.exp(logprob)
    return -p * (1.0 - p) if phi else -1.0


@given(logprobs=LOGPROBS, phi=st.booleans())
def test_the_weight_phi_has_no_gradient(logprobs, phi):
    """Red when `token_losses` does not detach p."""
    logprobs_E = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    Expert(phi=phi).token_losses(logprobs_E).sum().backward()
    assert logprobs_E.grad is not None
    assert logprobs_E.grad.tolist() == pytest.approx([plain_gradient(one, phi) for one in logprobs], abs=1e-12)


@given(logprobs=LOGPROBS, phi=st.booleans(), data=st.data())
def test_each_token_has_a_loss_of_its_own_whatever_stands_beside_it(logprobs, phi, data):
    """Permutation, a split into micro-batches, and duplication change no token's loss."""
    expert, logprobs_E = Expert(phi=phi), torch.tensor(logprobs, dtype=torch.float64)
    whole = expert.token_losses(logprobs_E)
    order = torch.tensor(data.draw(st.permutations(range(len(logprobs)))))
    cut = data.draw(st.integers(0, len(logprobs)))
    assert torch.equal(expert.token_losses(logprobs_E[order]), whole[order])
    parts = [expert.token_losses(logprobs_E[:cut]), expert.token_losses(logprobs_E[cut:])]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(expert.token_losses(logprobs_E.repeat(2)), whole.repeat(2))


def test_presets_and_settings():
    assert PRESETS["mix"].expert == Expert(mu=0.1)
    assert PRESETS["mix_chord"].expert == Expert(mu=0.1, phi=True)
    settings = ExpertConfig(dataset=ROWS, mu=0.5, mu_valley=0.0, mu_warmup_steps=3, mu_decay_steps=0, phi=False)
    algorithm = resolve("mix_chord", LossConfig(clip_high=0.28), 4, expert=settings)
    assert algorithm.expert == Expert(mu=0.5, mu_valley=0.0, mu_warmup_steps=3, mu_decay_steps=0, phi=False)
    assert algorithm.policy_loss_args["clip_high"] == 0.28
    assert configured(None, ExpertConfig(), "grpo") is None
    with pytest.raises(ConfigError, match="'grpo' learns from rollouts alone"):
        configured(None, ExpertConfig(phi=True), "grpo")
    with pytest.raises(ConfigError, match=r"set expert.dataset"):
        configured(Expert(), ExpertConfig(mu=0.2), "mix")
    with pytest.raises(ConfigError, match="'mu' must be at most 1"):
        ExpertConfig(mu=1.5)
