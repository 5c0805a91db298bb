"""Presets: the spec's defaults, overrides, and what is refused."""

from typing import Any

import numpy as np
import pytest

from sharpen.config.run import LossConfig, RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.returns import Scores
from sharpen.learning.recipe import check_settings, recipe_of


@pytest.mark.parametrize("name", ["grpo", "multi_step_grpo"])
def test_defaults_are_those_of_the_spec(name: str) -> None:
    algorithm = resolve(name, LossConfig(), 8)
    assert algorithm.policy_loss_args == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert (algorithm.kl, algorithm.kl_coef, algorithm.entropy_coef) == ("k2", 0.001, 0.0)
    assert (algorithm.aggregation, algorithm.policy_loss, algorithm.advantage_args) == ("token-mean", "ppo", {})
    assert algorithm.std_threshold is None
    assert algorithm.needs_reference
    assert not algorithm.needs_entropy
    assert algorithm.source


def test_overrides_replace_the_presets_values() -> None:
    loss = LossConfig(clip_high=0.28, kl="none", entropy_coef=0.01, aggregation="rollout-mean", step_norm=True)
    algorithm = resolve("multi_step_grpo", loss, 2)
    assert algorithm.policy_loss_args == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert not algorithm.needs_reference
    assert algorithm.needs_entropy
    assert algorithm.aggregation == "rollout-mean"
    np.testing.assert_allclose(
        algorithm.advantages(Scores.of_rollouts([1.0, 0.0], num_calls=[2, 1])),
        np.array([0.5 / 2, 0.5 / 2, -0.5]) / (np.sqrt(0.5) + 1e-6),
    )


def test_no_coefficient_means_no_reference() -> None:
    assert not resolve("grpo", LossConfig(kl_coef=0.0), 2).needs_reference


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'grop'; did you mean 'grpo'"):
        resolve("grop", LossConfig(), 8)


@pytest.mark.parametrize("name", sorted(name for name, preset in PRESETS.items() if preset.group_relative))
def test_trap_16_group_size_of_one_is_refused(name: str) -> None:
    """Red when `resolve` does not look at the group size."""
    with pytest.raises(ConfigError, match="group_size is 1"):
        resolve(name, LossConfig(), 1)


def test_overrides_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="step_norm has no effect"):
        resolve("grpo", LossConfig(step_norm=True), 8)
    with pytest.raises(ConfigError, match="kl is 'none'"):
        resolve("grpo", LossConfig(kl="none", kl_coef=0.1), 8)
    with pytest.raises(ConfigError, match=r"clip_low has no effect in 'opmd': its policy_loss 'opmd' takes tau"):
        resolve("opmd", LossConfig(clip_low=0.1), 8)
    with pytest.raises(ConfigError, match=r"policy_loss_args.tua has no effect"):
        resolve("opmd", LossConfig(policy_loss_args={"tua": 0.1}), 8)
    with pytest.raises(ConfigError, match="constant_length has no effect"):
        resolve("grpo", LossConfig(constant_length=10), 8)


def test_weights_of_named_rewards_are_numbers() -> None:
    algorithm = resolve("gdpo", LossConfig(advantage_args={"weights": {"right": 1, "tokens": -0.001}}), 4)
    assert algorithm.named_rewards == ("right", "tokens")
    assert resolve("gdpo", LossConfig(), 4).named_rewards == ()
    for weights in ({}, {"right": 0.0}, {"right": "1"}, ["right"], {"right": float("inf")}):
        with pytest.raises(ConfigError, match=r"loss.advantage_args.weights is .*: give each reward's name a number"):
            resolve("gdpo", LossConfig(advantage_args={"weights": weights}), 4)


def test_parts_can_be_exchanged_by_name() -> None:
    loss = LossConfig(advantage="rloo", policy_loss="gspo", clip_high=0.01)
    algorithm = resolve("grpo", loss, 4)
    assert (algorithm.advantage, algorithm.policy_loss) == ("rloo", "gspo")
    assert algorithm.policy_loss_args == {"clip_high": 0.01}  # ppo's own values do not stay behind
    assert algorithm.by_call
    with pytest.raises(ConfigError, match=r"unknown loss.advantage 'rlo'; did you mean 'rloo'"):
        resolve("grpo", LossConfig(advantage="rlo"), 4)


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("dapo", "token-mean"),  # equation 8: one over all tokens
        ("cispo", "token-mean"),  # equation 4: one over all tokens
        ("gspo", "sequence-mean-token-mean"),  # equation 10: each answer's tokens by its length
        ("sapo", "sequence-mean-token-mean"),
        ("icepop", "sequence-mean-token-mean"),
        ("remax", "token-mean"),  # its authors' code: the masked sum over the mask's
        ("dr_grpo", "constant-length"),
    ],
)
def test_a_preset_has_the_aggregation_of_its_paper(name: str, aggregation: str) -> None:
    assert PRESETS[name].aggregation == aggregation


def test_icepop_by_its_training_recipe() -> None:
    icepop = resolve("icepop", LossConfig(), 8)
    assert (icepop.behaviour, icepop.behaviour_low, icepop.behaviour_high) == ("masked", 0.5, 5.0)
    assert not icepop.needs_reference


def test_constant_length_is_the_models_max_tokens_unless_set() -> None:
    assert resolve("dr_grpo", LossConfig(), 2, max_tokens=512).constant_length == 512
    assert resolve("dr_grpo", LossConfig(constant_length=100), 2, max_tokens=512).constant_length == 100


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_cites_its_source_and_resolves(name: str) -> None:
    algorithm = resolve(name, LossConfig(), 4, max_tokens=64)
    assert algorithm.name == name
    assert "arXiv" in algorithm.source or "Trinity-RFT" in algorithm.source or "Williams" in algorithm.source


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (
            {"rollout": {"failure_reward": 0.0}},
            "rollout.failure_reward is 0, but .* has none of form",
        ),
        ({"sampling": {"overlong_cache": 4}}, "sampling.overlong_cache has no effect"),
        ({"sampling": {"turns_penalty": 0.1}}, "sampling.turns_penalty has no effect"),
    ],
)
def test_what_changes_only_a_rollouts_reward_does_not_go_with_other_named_ones(
    settings: dict[str, Any], part: str
) -> None:
    def check(weights: dict[str, float]) -> None:
        check_settings_of("gdpo", {"loss": {"advantage_args": {"weights": weights}}, **settings})

    with pytest.raises(ConfigError, match=part):
        check({"form": 1.0})
    check({"reward": 1.0})


@pytest.mark.parametrize("penalty", ["length_penalty", "turns_penalty"])
@pytest.mark.parametrize("name", ["gigpo", "ppo"])
def test_penalties_do_not_go_with_rewards_of_steps(name: str, penalty: str) -> None:
    """They change a rollout's reward, which these do not use where there are others."""
    with pytest.raises(ConfigError, match=f"sampling.{penalty} changes the reward of a rollout"):
        check_settings_of(name, {"sampling": {penalty: 0.1}})
    check_settings_of("grpo", {"sampling": {penalty: 0.1}})


def check_settings_of(name: str, settings: dict[str, Any]) -> None:
    config = {
        "train_dataset": {"path": "tasks"},
        "model": {"model_path": "toy", "max_model_len": 64, "max_tokens": 16},
        "algorithm": {"algorithm_type": name},
    }
    check_settings(recipe_of(RunConfig.model_validate(config | settings)))
