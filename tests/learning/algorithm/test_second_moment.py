"""Which tokens M2PO leaves out of an update: by hand, and what always holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import LossConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.second_moment import within_moment

ADVANTAGES = np.array([1.0, 2.0, -1.0, -0.5, 1.0, -1.0, 0.0, 1.0])
LOG_RATIOS = np.array([0.1, 0.3, -0.5, -0.2, -9.0, 9.0, 9.0, 0.0])
"""The first four are pushed further from the policy that sampled them: 0.01, 0.09, 0.25, 0.04, mean 0.0975. Of the
others, two are pulled back, one has no advantage, one is at the policy."""


def test_the_largest_are_left_out_until_the_mean_is_at_the_threshold() -> None:
    """Ascending 0.01, 0.04, 0.09, 0.25: the means of the first are 0.01, 0.025, 0.14 / 3, 0.0975."""
    found = within_moment(ADVANTAGES, LOG_RATIOS, threshold=0.05)
    assert found.kept_S.tolist() == [True, True, False, True, True, True, True, True]
    assert found.metrics() == pytest.approx(
        {
            "m2_before": 0.0975,
            "m2_after": 0.14 / 3,
            "m2_masked_fraction": 1 / 8,
            "m2_trust_region_fraction": 4 / 8,
        }
    )
    default = within_moment(ADVANTAGES, LOG_RATIOS)  # 0.04
    assert (~default.kept_S).nonzero()[0].tolist() == [1, 2]
    assert default.after == pytest.approx(0.025)


def test_all_are_kept_within_the_threshold_and_all_may_be_left_out() -> None:
    assert within_moment(ADVANTAGES, LOG_RATIOS, threshold=0.0976).kept_S.all()
    nothing = within_moment(ADVANTAGES, LOG_RATIOS, threshold=0.005)
    assert (~nothing.kept_S).nonzero()[0].tolist() == [0, 1, 2, 3]
    assert (nothing.before, nothing.after) == (pytest.approx(0.0975), 0.0)
    on_policy = within_moment(ADVANTAGES, np.zeros(8))
    assert on_policy.kept_S.all()
    assert (on_policy.num_pushed, on_policy.before, on_policy.after) == (0, 0.0, 0.0)
    assert within_moment(np.zeros(0), np.zeros(0)).kept_S.shape == (0,)


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5]), st.integers(-20, 20)), min_size=1, max_size=20),
    st.floats(0.001, 1.0),
)
def test_it_keeps_the_longest_beginning_whose_mean_is_within_the_threshold(
    tokens: list[tuple[float, int]], threshold: float
) -> None:
    pairs = [(advantage, ratio / 10) for advantage, ratio in tokens]
    found = within_moment(*map(np.array, zip(*pairs, strict=True)), threshold=threshold)
    pushed = sorted(ratio * ratio for advantage, ratio in pairs if advantage * ratio > 0)
    lengths = [n for n in range(1, len(pushed) + 1) if sum(pushed[:n]) / n <= threshold * (1 + 1e-12)]
    assert (~found.kept_S).sum() == len(pushed) - max(lengths, default=0)
    kept = [r * r for (a, r), keeps in zip(pairs, found.kept_S, strict=True) if keeps and a * r > 0]
    left_out = [r * r for (a, r), keeps in zip(pairs, found.kept_S, strict=True) if not keeps]
    assert max(kept, default=0.0) <= min(left_out, default=np.inf)
    assert all(a * r > 0 for (a, r), keeps in zip(pairs, found.kept_S, strict=True) if not keeps)


def test_the_preset_is_grpo_with_this_loss() -> None:
    grpo, found = (resolve(name, LossConfig(), 8) for name in ("grpo", "m2po"))
    assert found.masks_tokens
    assert not grpo.masks_tokens
    for part in ("advantage", "kl", "kl_coef", "aggregation", "behaviour"):
        assert getattr(found, part) == getattr(grpo, part), part
    assert (
        resolve("m2po", LossConfig(policy_loss_args={"threshold": 0.1}), 8)
        .keeps_tokens(ADVANTAGES, LOG_RATIOS)
        .kept_S.all()
    )


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"behaviour": "truncated"}, "loss.behaviour is 'truncated', but the policy loss 'm2po'"),
        ({"clip_low": 0.1}, "loss.clip_low has no effect in 'm2po': its policy_loss 'm2po' takes threshold"),
    ],
)
def test_what_it_does_not_take_is_refused(loss: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve("m2po", LossConfig.model_validate(loss), 8)
