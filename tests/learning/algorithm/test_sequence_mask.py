"""The mask of sequences by hand, against Trinity-RFT's and TRL's, in the loss, and its settings."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import LossConfig
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.plain.loss_rules import LossRules
from sharpen.evidence.certificate.plain.losses import kept_in_sequence
from sharpen.learning.algorithm.losses import POLICY_LOSSES
from sharpen.learning.algorithm.objective import policy_objective
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.sequence_mask import far_and_bad, shares_of_calls


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


OLD = tensor(-1.0, -1.0, -1.0, -1.0, -1.0, -1.0)
NOW = tensor(-1.1, -1.5, -1.5, -1.1, -0.1, -1.2)
A = tensor(-1.0, -1.0, 1.0, 1.0, -1.0, -1.0)
CALLS = torch.tensor([0, 0, 1, 1, 2, 2])
"""Mean of the old logprob less the new one: 0.3, 0.3, and -0.35, whose second token alone has 0.2."""


def test_far_and_bad_by_hand() -> None:
    assert far_and_bad(NOW, OLD, A, CALLS, threshold=0.25).tolist() == [True, True, False, False, False, False]
    assert not far_and_bad(NOW, OLD, A, CALLS, threshold=0.31).any()
    assert shares_of_calls(torch.tensor([0, 1, 1, 1]), tensor(0, 0, 0, 0)).tolist() == pytest.approx([1] + [1 / 3] * 3)


def test_a_token_is_left_out_by_its_own_advantage() -> None:
    found = far_and_bad(NOW[:2], OLD[:2], tensor(-1.0, 0.0), CALLS[:2], threshold=0.25)
    assert found.tolist() == [True, False]


@pytest.mark.parametrize("policy_loss", sorted(POLICY_LOSSES))
def test_what_is_left_out_has_no_loss_no_gradient_and_is_counted(policy_loss: str) -> None:
    """Red when the loss of a token that is left out stays, and when calls are counted by tokens."""
    now_E = torch.cat([NOW, tensor(-1.0)]).requires_grad_()
    old_E, advantages_E = torch.cat([OLD, tensor(-1.0)]), torch.cat([A, tensor(-1.0)])
    calls_E = torch.cat([CALLS, torch.tensor([3])])
    algorithm = Algorithm(name="x", policy_loss=policy_loss, sequence_mask=0.25, source="-")
    weights_E = torch.full((7,), 1 / 7, dtype=torch.float64)
    loss, sums, tokens = policy_objective(algorithm, now_E, old_E, advantages_E, weights_E, calls_E=calls_E)
    (gradient,) = torch.autograd.grad(loss, now_E)
    assert gradient[:2].tolist() == [0.0, 0.0]
    assert tokens.clipped_E[:2].all()
    values = sums.means(algorithm)
    assert values["sequence_mask_token_fraction"] == pytest.approx(2 / 7)
    assert values["sequence_mask_call_fraction"] == pytest.approx(1 / 4)
    without, plain, _ = policy_objective(
        Algorithm(name="x", policy_loss=policy_loss, source="-"),
        now_E,
        old_E,
        advantages_E * tensor(0, 0, 1, 1, 1, 1, 1),
        weights_E,
        calls_E=calls_E,
    )
    assert float(loss.detach()) == pytest.approx(float(without.detach()), abs=1e-12)
    assert "sequence_mask_token_fraction" not in plain.means(Algorithm(name="x", source="-"))


def test_the_record_is_compared_even_where_the_loss_looks_at_the_step_s_beginning() -> None:
    algorithm = Algorithm(name="x", behaviour="unweighted", policy_loss="reinforce", sequence_mask=0.25, source="-")
    *_, tokens = policy_objective(algorithm, NOW, OLD, A, torch.ones_like(NOW), calls_E=CALLS, proximal_E=NOW)
    assert tokens.clipped_E.tolist() == [True, True, False, False, False, False]


def test_the_loss_of_trinity_with_sequence_masking() -> None:
    """The random numbers and the results of `test_ppo_policy_loss_with_sequence_masking` in Trinity-RFT's
    tests/algorithm/policy_loss_test.py: clip 0.2, dual clip 3, δ 0.1, token-mean. It divides the tokens left out,
    padding among them, by the tokens that count."""
    torch.manual_seed(42)
    now, old, _ = (2 * torch.rand(5, 20) - 1 for _ in range(3))
    counts, advantages = torch.rand(5, 20) > 0.5, 2 * torch.rand(5, 20) - 1
    rows = torch.arange(5)[:, None].expand(5, 20)
    arguments = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    algorithm = Algorithm(name="x", policy_loss_args=arguments, sequence_mask=0.1, source="-")
    loss, sums, _ = policy_objective(
        algorithm,
        now[counts],
        old[counts],
        advantages[counts],
        torch.full((int(counts.sum()),), 1 / int(counts.sum())),
        calls_E=rows[counts],
    )
    assert float(loss) == pytest.approx(0.22175675630569458, rel=1e-5)
    assert float(sums.clipped) / int(counts.sum()) == pytest.approx(0.3541666567325592 + 0.0625, abs=1e-5)
    without, *_ = policy_objective(
        Algorithm(name="x", policy_loss_args=arguments, source="-"),
        now[counts],
        old[counts],
        advantages[counts],
        torch.full((int(counts.sum()),), 1 / int(counts.sum())),
    )
    assert float(without) == pytest.approx(0.26889559626579285, rel=1e-5)


def test_the_mask_of_trl() -> None:
    """`GRPOTrainer.get_off_policy_mask` of TRL 1.16.0 on these sequences, threshold 0.25: it keeps the second and the
    third (`[[0.], [1.], [1.]]`)."""
    far = far_and_bad(NOW, OLD, tensor(-1, -1, 1, 1, -1, -1), CALLS, threshold=0.25).reshape(3, 2)
    assert (~far).double().tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


logprob = st.floats(-4.0, -0.01)
TOKENS = st.lists(st.tuples(logprob, logprob, st.sampled_from([-2.0, 0.0, 1.5])), min_size=1, max_size=6)


@given(st.lists(TOKENS, min_size=1, max_size=4), st.floats(0.01, 1.0))
def test_it_equals_the_certificates_own_and_ignores_other_calls(
    calls: list[list[tuple[float, float, float]]], threshold: float
) -> None:
    now_E, old_E, advantages_E = (tensor(*(token[at] for call in calls for token in call)) for at in range(3))
    calls_E = torch.tensor([number for number, call in enumerate(calls) for _ in call])
    means = [math.fsum(old - now for now, old, _ in call) / len(call) for call in calls]
    if any(abs(mean - threshold) < 1e-9 for mean in means):
        return
    found = far_and_bad(now_E, old_E, advantages_E, calls_E, threshold=threshold)
    assert found.tolist() == [
        advantage < 0 and mean > threshold for call, mean in zip(calls, means, strict=True) for *_, advantage in call
    ]
    rules = LossRules(sequence_mask=threshold)
    for number in range(len(calls)):
        of_call = calls_E == number
        kept_S = kept_in_sequence(rules, now_E[of_call], old_E[of_call], advantages_E[of_call])
        assert (kept_S == 0).tolist() == found[of_call].tolist()


def test_its_setting_makes_the_algorithm_need_calls_and_records() -> None:
    found = resolve("opmd", LossConfig(sequence_mask=0.2), 4)
    assert (found.sequence_mask, found.by_call, found.needs_ratio) == (0.2, True, True)
    assert not resolve("opmd", LossConfig(), 4).by_call
    with pytest.raises(ConfigError, match=r"loss.sequence_mask has no effect: no advantage of 'raft' is negative"):
        resolve("raft", LossConfig(sequence_mask=0.2), 4)
