"""The objective: parts by hand, additive over micro-batches, effective sample size."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.config.run import AGGREGATIONS
from sharpen.learning.algorithm.aggregation import token_weights
from sharpen.learning.algorithm.objective import (
    effective_sample_share,
    policy_objective,
    sample_share_alarm,
    sequence_log_ratios,
)
from sharpen.learning.algorithm.presets import PRESETS, Algorithm

FULL = replace(PRESETS["grpo"], kl="k3", kl_coef=0.1, entropy_coef=0.01)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_objective_by_hand() -> None:
    logprobs = tensor(math.log(0.5), math.log(0.3)).requires_grad_()
    loss, sums, by_token = policy_objective(
        FULL,
        logprobs,
        tensor(math.log(0.25), math.log(0.3)),  # ratios 2 and 1
        tensor(1.0, -1.0),
        tensor(0.25, 0.75),
        ref_logprobs_E=tensor(math.log(0.5), math.log(0.6)),  # k3: 0 and 2 - 1 - log 2
        entropy_E=tensor(1.0, 3.0),
    )
    kl = 1 - math.log(2)
    # PPO: -1.2 (clipped at 1.2) and +1; entropy bonus 0.01 * (0.25 * 1 + 0.75 * 3)
    expected = 0.25 * -1.2 + 0.75 * 1.0 + 0.1 * 0.75 * kl - 0.01 * 2.5
    assert float(loss.detach()) == pytest.approx(expected)
    metrics = sums.means(FULL)
    assert metrics["loss"] == pytest.approx(expected)
    assert metrics["clip_fraction"] == 0.5
    assert by_token.clipped_E.tolist() == [True, False]
    assert by_token.log_ratios_E.tolist() == pytest.approx([math.log(2), 0.0])
    assert metrics["ratio_mean"] == pytest.approx(1.5)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["kl_old"] == pytest.approx((2 - 1 - math.log(2)) / 2)  # sampled from the old policy: ratio - 1 - log
    assert metrics["kl_reference"] == pytest.approx(kl / 2)
    assert metrics["entropy"] == 2.0
    loss.backward()
    # clipped, k3 0 at equality: no gradient; second: 0.75 * (-A * ratio) + 0.1 * 0.75 * (1 - exp(-x)), exp(-x) = 2
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.75 - 0.075])


def test_disabled_terms_are_not_used() -> None:
    algorithm = replace(PRESETS["grpo"], kl_coef=0.0)
    nan = tensor(math.nan)
    loss, sums, _ = policy_objective(algorithm, tensor(-1.0), tensor(-1.0), tensor(2.0), tensor(1.0), nan, nan)
    assert float(loss) == -2.0
    assert "kl_reference" not in sums.means(algorithm)


def update(sizes: list[list[int]], algorithm: Algorithm) -> dict[str, torch.Tensor]:
    """Random tokens of an update whose rollouts have calls of these sizes."""
    lengths = [(rollout, length) for rollout, calls in enumerate(sizes) for length in calls]
    tokens = [length for _, length in lengths]
    rollouts = np.repeat([rollout for rollout, _ in lengths], tokens)
    weights = token_weights(algorithm.aggregation, rollouts, np.repeat(np.arange(len(lengths)), tokens))
    generator = torch.Generator().manual_seed(len(rollouts))
    logprobs = [-torch.rand(len(rollouts), generator=generator, dtype=torch.float64) * 3 for _ in range(3)]
    return {
        "logprobs_E": logprobs[0].requires_grad_(),
        "old_logprobs_E": logprobs[1],
        "advantages_E": torch.randn(len(sizes), generator=generator, dtype=torch.float64)[torch.from_numpy(rollouts)],
        "weights_E": torch.from_numpy(weights),
        "ref_logprobs_E": logprobs[2],
        "entropy_E": torch.rand(len(rollouts), generator=generator, dtype=torch.float64),
    }


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from([mode for mode in AGGREGATIONS if mode != "constant-length"]),
    st.randoms(use_true_random=False),
)
def test_trap_19_gradient_does_not_depend_on_the_micro_batch_split(
    sizes: list[list[int]], aggregation: str, random: Random
) -> None:
    """Red when `policy_objective` divides by its own number of tokens (or takes any mean)."""
    algorithm = replace(FULL, aggregation=aggregation)  # type: ignore[arg-type]
    tokens = update(sizes, algorithm)
    whole, sums, _ = policy_objective(algorithm, **tokens)  # type: ignore[arg-type]
    (expected,) = torch.autograd.grad(whole, tokens["logprobs_E"])
    order = list(range(len(expected)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    parts = [order[:cut], order[cut:]]
    results = [policy_objective(algorithm, **{k: v[part] for k, v in tokens.items()}) for part in parts]  # type: ignore[arg-type]
    loss = results[0][0] + results[1][0]
    (found,) = torch.autograd.grad(loss, tokens["logprobs_E"])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    added = (results[0][1] + results[1][1]).means(algorithm)
    assert added == pytest.approx(sums.means(algorithm))


def test_trap_12_collapse_of_sequence_weights_is_reported() -> None:
    """Tiny drifts of each token multiply over long rollouts. Red when the sample size is taken over tokens."""
    generator = torch.Generator().manual_seed(0)
    num_sequences, length = 64, 2000
    drift = 0.1 * torch.randn(num_sequences * length, generator=generator, dtype=torch.float64)
    sequences = torch.arange(num_sequences).repeat_interleave(length)
    share = effective_sample_share(sequence_log_ratios(drift, torch.zeros_like(drift), sequences, num_sequences))
    assert share < 0.1
    alarm = sample_share_alarm(share)
    assert alarm is not None
    assert "collapsed" in alarm
    short = sequences[:: length // 5][: num_sequences * 5]
    healthy = effective_sample_share(sequence_log_ratios(drift[:320], torch.zeros(320), short, num_sequences))
    assert sample_share_alarm(healthy) is None


def test_effective_sample_share_by_hand() -> None:
    # weights 1, 1, 2: (4)^2 / (3 * 6) = 16 / 18
    assert effective_sample_share(tensor(0.0, 0.0, math.log(2))) == pytest.approx(16 / 18)
    assert effective_sample_share(tensor(3.0, 3.0)) == pytest.approx(1.0)
    assert effective_sample_share(tensor(5000.0, 0.0)) == pytest.approx(0.5)  # no overflow
    assert effective_sample_share(tensor()) == 1.0


def test_sequence_log_ratios_add_over_micro_batches() -> None:
    now, old = tensor(-1.0, -2.0, -3.0), tensor(-1.5, -2.0, -1.0)
    sequences = torch.tensor([0, 1, 0])
    whole = sequence_log_ratios(now, old, sequences, 2)
    assert whole.tolist() == [-1.5, 0.0]
    parts = sum(sequence_log_ratios(now[i : i + 1], old[i : i + 1], sequences[i : i + 1], 2) for i in range(3))
    assert torch.equal(whole, parts)  # type: ignore[arg-type]
