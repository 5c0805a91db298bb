"""The adaptive coefficient of the KL term, and the settings of where the term is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import LossConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.kl import adapt_coefficient
from sharpen.learning.algorithm.resolve import resolve


def test_adapt_coefficient_by_hand() -> None:
    # found 0.11 at target 0.1: error 0.1; 50 of 100 rollouts: 0.2 * (1 + 0.1 * 0.5)
    assert adapt_coefficient(0.2, 0.11, target=0.1, horizon=100, num_rollouts=50) == pytest.approx(0.21)
    # twice the target: the error is held at 0.2
    assert adapt_coefficient(0.2, 0.2, target=0.1, horizon=100, num_rollouts=50) == pytest.approx(0.22)
    # below 0 (k1 can be): held at -0.2; more rollouts than the horizon count as one horizon
    assert adapt_coefficient(0.2, -1.0, target=0.1, horizon=10, num_rollouts=50) == pytest.approx(0.16)
    assert adapt_coefficient(0.2, 0.1, target=0.1, horizon=10, num_rollouts=50) == 0.2


@given(st.floats(1e-6, 10), st.floats(-10, 10), st.floats(1e-3, 10), st.integers(1, 1000), st.integers(1, 5000))
def test_the_coefficient_stays_above_zero_and_moves_towards_the_target(
    coefficient: float, found: float, target: float, horizon: int, num_rollouts: int
) -> None:
    after = adapt_coefficient(coefficient, found, target=target, horizon=horizon, num_rollouts=num_rollouts)
    assert 0.8 * coefficient * (1 - 1e-12) <= after <= 1.2 * coefficient * (1 + 1e-12)
    assert (after >= coefficient) if found > target else (after <= coefficient)


def test_where_the_term_is_can_be_set() -> None:
    algorithm = resolve("grpo", LossConfig(kl="k1", kl_in="reward", kl_target=0.05, kl_horizon=500), 4)
    assert (algorithm.kl, algorithm.kl_in, algorithm.kl_target, algorithm.kl_horizon) == ("k1", "reward", 0.05, 500)
    assert algorithm.scores_tokens
    assert algorithm.trains_zero_advantages
    assert not resolve("grpo", LossConfig(), 4).scores_tokens


def test_settings_without_effect_are_refused() -> None:
    for setting in ({"kl_in": "reward"}, {"kl_target": 0.1}):
        with pytest.raises(ConfigError, match="has no effect: there is no KL term"):
            resolve("grpo", LossConfig(kl="none", **setting), 4)
    with pytest.raises(ConfigError, match=r"set loss\.kl_target too"):
        resolve("grpo", LossConfig(kl_horizon=10), 4)
