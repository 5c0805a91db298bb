"""Presets: the spec's defaults, overrides, and what is refused."""

import numpy as np
import pytest

from agenttune.algorithm.presets import PRESETS, resolve
from agenttune.config.run import LossConfig
from agenttune.errors import ConfigError


@pytest.mark.parametrize("name", ["grpo", "multi_step_grpo"])
def test_defaults_are_those_of_the_spec(name: str) -> None:
    algorithm = resolve(name, LossConfig(), 8)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.2, 3.0)
    assert (algorithm.kl, algorithm.kl_coef, algorithm.entropy_coef) == ("k2", 0.001, 0.0)
    assert (algorithm.aggregation, algorithm.std_normalize, algorithm.step_norm) == ("token-mean", True, False)
    assert algorithm.std_threshold is None
    assert algorithm.needs_reference
    assert not algorithm.needs_entropy
    assert algorithm.source


def test_overrides_replace_the_presets_values() -> None:
    loss = LossConfig(clip_high=0.28, kl="none", entropy_coef=0.01, aggregation="rollout-mean", step_norm=True)
    algorithm = resolve("multi_step_grpo", loss, 2)
    assert algorithm.clip_high == 0.28
    assert not algorithm.needs_reference
    assert algorithm.needs_entropy
    assert algorithm.aggregation == "rollout-mean"
    np.testing.assert_allclose(
        algorithm.advantages(np.array([1.0, 0.0]), np.array([2, 1])),
        np.array([0.5 / 2, -0.5]) / (np.sqrt(0.5) + 1e-6),
    )


def test_no_coefficient_means_no_reference() -> None:
    assert not resolve("grpo", LossConfig(kl_coef=0.0), 2).needs_reference


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'grop'; did you mean 'grpo'"):
        resolve("grop", LossConfig(), 8)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_trap_16_group_size_of_one_is_refused(name: str) -> None:
    """Red when `resolve` does not look at the group size."""
    with pytest.raises(ConfigError, match="group_size is 1"):
        resolve(name, LossConfig(), 1)


def test_overrides_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="step_norm has no effect"):
        resolve("grpo", LossConfig(step_norm=True), 8)
    with pytest.raises(ConfigError, match="kl is 'none'"):
        resolve("grpo", LossConfig(kl="none", kl_coef=0.1), 8)
