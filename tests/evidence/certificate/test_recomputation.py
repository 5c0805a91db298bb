"""The recomputation agrees with what is trained, for every advantage, aggregation and preset; and with numbers worked
out by hand where it is the only one that says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from experience_builders import audited, make_call, make_group, make_rollout, rules_of
from planted_run import a_step, resolved

from sharpen.config.run import AGGREGATIONS
from sharpen.evidence.certificate import rules
from sharpen.evidence.certificate.expectation import expect
from sharpen.evidence.certificate.formulas import FORMULAS
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.algorithm.advantages import ADVANTAGES
from sharpen.learning.algorithm.presets import PRESETS, Algorithm
from sharpen.learning.algorithm.shaping import Shaping
from sharpen.learning.experience.draw import draw_batches
from sharpen.learning.recipe import algorithm_of
from sharpen.types import CallStatus, Group, Sampling


def tool_messages(seen: int, id_: str) -> tuple[dict[str, object], ...]:
    """A conversation that ends with what a tool said; its ids are of this rollout alone."""
    asked = {"role": "assistant", "content": "", "tool_calls": [{"id": id_, "function": {"name": "look"}}]}
    return (
        {"role": "user", "content": "q"},
        asked,
        {"role": "tool", "tool_call_id": id_, "content": f"room {seen}"},
    )


def some_step(seed: int, notes: bool = False) -> list[Group]:
    """Groups of four with one to three calls each, of which some are greedy or abandoned; a flat group, and a rollout
    that never called. With `notes` owners said rewards of steps and of calls, and states."""
    random = np.random.default_rng(seed)
    groups = []
    for task in range(5):
        rollouts = []
        for index in range(4):
            calls = []
            for number in range(int(random.integers(1, 4))):
                kind = random.random()
                status = CallStatus.ABANDONED if kind < 0.1 and number else CallStatus.USED
                sampling = Sampling(temperature=0.0 if 0.1 < kind < 0.2 else 1.0)
                sampled = random.integers(0, 50, int(random.integers(1, 9))).tolist()
                zeros = np.zeros(len(sampled), np.int32)
                messages = tool_messages(int(random.integers(3)), f"call-{task}-{index}-{number}")
                calls.append(
                    make_call(
                        number, [1, number, 2], sampled,
                        status=status, sampling=sampling, versions_S=zeros, messages=messages,
                    )
                )  # fmt: skip
            reward = 1.0 if task == 0 else round(float(random.random()), 2)
            said = {}
            if notes:
                said["call_rewards"] = {
                    n: round(float(random.random()), 2) for n in range(len(calls)) if random.random() < 0.7
                }
                said["step_rewards"] = {
                    n: round(float(random.random()), 2) for n in range(len(calls)) if random.random() < 0.7
                }
                said["states"] = {n: str(random.integers(3)) for n in range(len(calls)) if random.random() < 0.5}
            said["metrics"] = {"judge/right": float(random.integers(2)), "form": round(float(random.random()), 1)}
            rollouts.append(make_rollout(calls if (task, index) != (1, 2) else [], reward, f"g{task}", index, **said))
        greedy = make_call(0, [1], [2], sampling=Sampling(temperature=0.0))
        baseline = make_rollout([greedy], round(float(random.random()), 2), f"g{task}", 4)
        groups.append(make_group(rollouts, f"g{task}", version=0, baseline=baseline))
    return groups


ARGUMENTS = {
    "gdpo": {"weights": {"reward": 1.0, "right": 0.5, "form": -2.0}},
    "grpo": {"std_normalize": False},
    "step_wise_grpo": {"step_norm": True},
    "opmd": {"tau": 0.7},
    "asymre": {"baseline_shift": 0.3},
    "rec": {"std_normalize": True},
    "pass_at_k": {"k": 2},
    "gigpo": {"omega": 0.5, "gamma": 0.9, "std_normalize": True},
    "step_rewards": {"gamma": 0.9},
    "grpo_global_std": {"step_norm": True},
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_advantage_is_recomputed(advantage: str, given: bool) -> None:
    """Red when a formula of either side is another one (tried with each of `certificate.formulas`)."""
    arguments = ARGUMENTS.get(advantage, {}) if given else {"k": 3} if advantage == "pass_at_k" else {}
    algorithm = Algorithm(name="x", advantage=advantage, advantage_args=arguments, source="")
    for seed, notes in ((0, False), (1, True), (2, True)):
        groups = some_step(seed, notes)
        for num_minibatches in (1, 3):
            checks = audited(groups, draw_batches(groups, algorithm, num_minibatches), algorithm, group_size=4)
            assert not [check for check in checks.values() if check.broken]
            assert checks["advantages"].checked > 100


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_is_recomputed(aggregation: str) -> None:
    algorithm = Algorithm(name="x", aggregation=aggregation, constant_length=7, source="")
    groups = some_step(0)
    for num_minibatches in (1, 2, 4):
        checks = audited(groups, draw_batches(groups, algorithm, num_minibatches), algorithm, group_size=4)
        assert not [check for check in checks.values() if check.broken]


@pytest.mark.parametrize(
    "advantage", ["grpo", "gdpo", "gigpo", "step_rewards", "gae", "call_gae", "reinforceplusplus_tokens"]
)
def test_thresholds_punishment_and_filters_are_recomputed(advantage: str) -> None:
    """Who is left out, and for what; red when either side looks at other rewards."""
    shaping = Shaping(max_length=8, cache=4, penalty=0.5, reward_low=0.3, reward_high=0.7, drop_truncated=True)
    arguments = {"gigpo": {"across_tasks": True, "gamma": 0.5}, "gdpo": ARGUMENTS["gdpo"]}.get(advantage, {})
    reasons = set()
    for seed in range(8):
        groups = some_step(seed, notes=seed % 2 == 0)
        for threshold in (0.0, 0.3):
            algorithm = Algorithm(
                name="x",
                advantage=advantage,
                advantage_args=arguments,
                std_threshold=threshold,
                shaping=shaping,
                source="",
            )
            batches = draw_batches(groups, algorithm, 2)
            checks = audited(groups, batches, algorithm, group_size=4)
            assert not [check for check in checks.values() if check.broken]
            reasons |= {reason for batch in batches for reason in batch.left_out.values()}
    assert {"filtered", "flat"} <= reasons


@pytest.mark.parametrize("advantage", ["grpo", "maxrl", "reinforceplusplus", "gdpo"])
def test_penalties_on_length_and_turns_are_recomputed(advantage: str) -> None:
    """Red when either side takes another mean, counts other calls, or compares with another group."""
    for length, turns, cache in ((0.25, 0.0, None), (0.0, 0.5, None), (0.25, 0.5, 4)):
        shaping = Shaping(length=length, turns=turns, max_length=8, cache=cache)
        algorithm = Algorithm(name="x", advantage=advantage, shaping=shaping, std_threshold=0.0, source="")
        for seed in range(3):
            groups = some_step(seed)
            checks = audited(groups, draw_batches(groups, algorithm, 2), algorithm, group_size=4)
            assert not [check for check in checks.values() if check.broken]


def test_the_tables_are_whole() -> None:
    """An algorithm that the certificate does not know would not be checked."""
    assert set(FORMULAS) == set(ADVANTAGES)
    assert set(rules.PRESETS) == set(PRESETS)
    for name, formula in FORMULAS.items():
        other = ADVANTAGES[name]
        assert (formula.group_relative, formula.baseline, formula.needs_reward) == (
            other.group_relative, other.baseline, other.needs_reward,
        )  # fmt: skip
        assert formula.centred == other.centred
        assert (formula.by_role, formula.token_baseline) == (other.by_role, other.token_baseline)
        assert formula.critic == (other.of_tokens is not None)
        assert formula.entropy_clip == (other.clip is not None)


@pytest.mark.parametrize("name", PRESETS)
def test_the_rules_of_every_preset_are_what_its_algorithm_is(name: str) -> None:
    """Two tables written apart. Red when a preset's aggregation or advantage is changed in one of them."""
    settings = {"algorithm.algorithm_type": name, "sampling.reward_high": 0.9}
    if name in ("mix", "mix_chord"):
        settings["expert.dataset.path"] = "expert.jsonl"
    if name in ("on_policy_distill", "jsd"):
        settings = {"algorithm.algorithm_type": name, "distill.teacher_path": "teacher"}
    config = resolved(**settings).config
    algorithm, found = algorithm_of(config), Rules.of(config)
    expected = rules_of(algorithm, group_size=4, batch_size=4, num_minibatches=2)
    assert replace(
        found, arguments={}, teacher=False, expert=False, constant_length=None, kl_in_reward=False
    ) == replace(expected, arguments={}, constant_length=None)
    assert (found.teacher, found.expert) == (algorithm.needs_teacher, algorithm.expert is not None)
    assert dict(found.arguments) == dict(algorithm.advantage_args)
    if algorithm.aggregation == "constant-length":
        assert found.constant_length == algorithm.constant_length


def test_numbers_by_hand() -> None:
    """Rewards 1, 0, 0.5, 0.25: mean 0.4375, unbiased deviation 0.4270."""
    groups = a_step()[:1]
    expected = expect(groups, (), Rules(group_size=4), {})
    rewards = np.array([1.0, 0.0, 0.5, 0.25])
    by_hand = (rewards - 0.4375) / (0.426956 + 1e-6)
    found = [expected.calls[f"step-0/a/{index}", 0].advantage for index in range(4)]
    assert np.allclose(found, by_hand, atol=1e-5)
    # Sampled tokens: 2, 3, 4, 5 in the first calls and one in each second call: 18.
    assert {one.weight for one in expected.calls.values()} == {1 / 18}
    by_answer = expect(groups, (), Rules(group_size=4, aggregation="sequence-mean-token-mean"), {})
    assert by_answer.calls["step-0/a/2", 0].weight == 1 / (8 * 4)
