"""Workflows and files of Trinity-RFT get the advantages that Trinity-RFT itself computes.

The constants were computed once by the code of the published wheel `trinity-rft` 0.6.0, called with the same rewards,
states, values and lengths: `GiGPOAdvantageFn`, `PPOAdvantageFn`, `REINFORCEPLUSPLUSAdvantageFn`,
`StepWiseGRPOAdvantageFn`, `GRPOGroupedAdvantage`, `SAPOPolicyLossFn`. It computes in float32, and divides by 1 + 1e-6
where nothing is normalized.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from trinity_serving import MakePlace

from sharpen.compat.trinity import RewardPropagationWorkflow, StepWiseRewardWorkflow, Workflow
from sharpen.compat.trinity.yaml.conversion import convert
from sharpen.config.load import resolve
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.losses import POLICY_LOSSES
from sharpen.learning.algorithm.presets import PRESETS, Algorithm
from sharpen.learning.experience.draw import make_batch, score
from sharpen.learning.recipe import algorithm_of
from sharpen.learning.trainer.credit import assign
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.work import Part
from sharpen.types import Group

TASKS: dict[str, list[dict[str, Any]]] = {
    "first": [
        {"states": "ABAC", "rewards": [0.0, 0.0, 0.0, 0.78], "tokens": [3, 1, 2, 2]},
        {"states": "AB", "rewards": [0.0, -0.1], "tokens": [1, 4]},
    ],
    "second": [
        {"states": "DB", "rewards": [0.25, 0.5], "tokens": [2, 2]},
        {"states": "DED", "rewards": [0.0, 0.125, 0.0], "tokens": [1, 1, 3]},
    ],
}
"""Two tasks of two episodes: states, rewards of steps, tokens that each call samples. State B occurs in both tasks."""


class Episode(RewardPropagationWorkflow):
    """As Trinity's `StepWiseAlfworldWorkflow`: a call for each step, the last reward on all of them, and in `info` the
    state before the step and its own reward."""

    max_step_num = 9
    notes: tuple[str, ...] = ("env_state_hash", "step_reward")

    @property
    def played(self) -> dict[str, Any]:
        return TASKS[self.task.raw_task["prompt"]][self.task.index["rollout"]]

    def run(self) -> Any:
        experiences = super().run()
        for exp, state, reward in zip(experiences, self.played["states"], self.played["rewards"], strict=True):
            given = {"env_state_hash": state, "step_reward": reward}
            exp.info.update({name: given[name] for name in self.notes})
        return experiences

    def step(self, step_num: int) -> bool:
        self.model.chat([{"role": "user", "content": str(step_num)}], max_tokens=self.played["tokens"][step_num])
        return step_num + 1 < len(self.played["states"])

    def reward(self, exps: Any) -> float:
        return float(self.played["rewards"][-1])


class OnlyStates(Episode):
    """Says nothing of its steps' rewards."""

    notes = ("env_state_hash",)


class OwnRewards(Episode):
    """Writes each call's own reward on it, and nothing into `info`."""

    notes = ()

    def run(self) -> Any:
        experiences = super().run()
        for exp, reward in zip(experiences, self.played["rewards"], strict=True):
            exp.reward = reward
        return experiences


def groups_of(make_place: MakePlace, workflow: Any = Episode) -> list[Group]:
    place = make_place("a long answer, cut")
    groups = place.run(workflow, *({"prompt": name} for name in TASKS), group_size=2)
    assert [rollout.error for group in groups for rollout in group.rollouts] == [None] * 4
    return groups


def algorithm(name: str, **keys: Any) -> Algorithm:
    """That of a file of Trinity's."""
    content: dict[str, Any] = {
        "model": {"model_path": "m", "max_model_len": 512},
        "algorithm": {"algorithm_type": name, "repeat_times": 2, **keys},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl", "default_workflow_type": "math_workflow"}}},
    }
    return algorithm_of(resolve(convert(content, "f.yaml", environment={})).config)


def of_calls(groups: list[Group], algorithm: Algorithm) -> list[list[float]]:
    """The advantages of each rollout's calls."""
    found = score(groups, algorithm)
    return [found[rollout.id].tolist() for group in groups for rollout in group.rollouts]


OMEGA_1 = [
    [0.73333263, 0.82666588, 0.73333263, 0.43999958],
    [-1.02666569, -0.93333238],
    [0.7708326, 0.41916627],
    [-0.47916621, -0.3124997, -0.60416609],
]
OMEGA_HALF_GAMMA_STD = [
    [0.91355032, 1.07610333, 1.07082462, 0.70710564],
    [-1.27726936, -1.27615511],
    [1.27795315, 0.90715694],
    [-0.91770935, -0.70710516, -1.06734908],
]
WITHOUT_REWARDS_OF_STEPS = [
    [0.73333263, 0.82666588, 0.73333263, 0.43999958],
    [-1.02666569, -0.93333238],
    [0.58333278, 0.35666633],
    [-0.41666627, -0.24999976, -0.41666627],
]


@pytest.mark.parametrize(
    ("workflow", "arguments", "expected"),
    [
        # examples/gigpo_alfworld/gigpo.yaml of Trinity-RFT
        (Episode, {"omega": 1.0, "gamma": 1.0, "fnorm": "none", "epsilon": 1e-6}, OMEGA_1),
        (Episode, {"omega": 0.5, "gamma": 0.9, "fnorm": "std"}, OMEGA_HALF_GAMMA_STD),
        (OnlyStates, {}, WITHOUT_REWARDS_OF_STEPS),
    ],
)
def test_gigpo_of_a_trinity_file(make_place: MakePlace, workflow: Any, arguments: Any, expected: Any) -> None:
    found = of_calls(groups_of(make_place, workflow), algorithm("gigpo", advantage_fn_args=arguments))
    assert [x for calls in found for x in calls] == pytest.approx([x for calls in expected for x in calls], abs=1e-6)


def test_elsewhere_gigpo_compares_states_of_one_task(make_place: MakePlace) -> None:
    """By hand. First task: episodes 0.78 and -0.1, so ±0.44; A is met with returns 0.78, 0.78, -0.1 (mean 1.46 / 3), B
    with 0.78 and -0.1 (mean 0.34). Second: 0.75 and 0.125, so ±0.3125; D with 0.75, 0.125, 0 (mean 0.875 / 3)."""
    found = of_calls(groups_of(make_place), PRESETS["gigpo"])
    first, second = 0.78 - 1.46 / 3, -0.1 - 1.46 / 3
    assert found[0] == pytest.approx([0.44 + first, 0.44 + 0.44, 0.44 + first, 0.44], abs=1e-6)
    assert found[1] == pytest.approx([-0.44 + second, -0.44 - 0.44], abs=1e-6)
    assert found[2] == pytest.approx([0.3125 + 0.75 - 0.875 / 3, 0.3125], abs=1e-6)
    assert found[3] == pytest.approx([-0.3125 + 0.125 - 0.875 / 3, -0.3125, -0.3125 - 0.875 / 3], abs=1e-6)


PPO = [[1.0978972] * 8, [-1.1585032] * 5, [0.3799517] * 4, [-0.9020941] * 5]
PPO_VALUES = [
    [1.4647274, 1.1098377, 0.7549476, 1.2281342, 0.9915409, 0.636651, 0.7549476, 1.5830241],
    [-1.5636663, -0.6172933, -0.9721832, -1.3270732, -0.4989966],
    [0.5656731, 0.2107832, 0.3290798, -0.0258101],
    [-1.0904799, -1.327073, -0.3807, -0.7355899, -1.0904799],
]
PPO_VALUES_GAMMA_LAMBDA = [
    [0.9179372, 0.9054243, 0.9443243, 1.4846035, 0.7946671, 0.8092546, 0.3300269, 1.8898131],
    [-1.7030439, -0.2878105, -0.7692253, -1.3815777, -0.4874156],
    [0.4715801, 0.3230033, 0.2500656, 0.0528637],
    [-1.1627647, -1.4329042, -0.1743778, -0.6116799, -1.1627647],
]
PPO_OWN_VALUES_GAMMA_LAMBDA = [
    [0.4326408, -0.1482565, -0.8802989, -0.1626102, -0.2953826, -1.059721, 1.1026748, 3.1746421],
    [-1.2391433, 0.2819606, -0.3575345, -1.1709628, 0.016812],
    [0.6447895, 0.1962341, 0.996457, 0.7345006],
    [-0.8802989, -0.7905878, 0.4326408, -0.1482565, -0.8802989],
]


def of_tokens(groups: list[Group], algorithm: Algorithm, values: bool = True) -> list[list[float]]:
    """The advantages of each rollout's tokens as the trainer makes them. The value of token j of the i-th call of the
    step is `((i + 2 j) mod 5) / 10 - j / 20`, or 0."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    calls = [(rollout.id, call.index) for rollout in rollouts for call in rollout.calls]
    parts = []
    for of_pack in pack(make_batch(groups, algorithm).experiences, 4096):
        keys = [(of_pack.rollout_ids[r], int(c)) for r, c in zip(of_pack.rollouts_E, of_pack.calls_E, strict=True)]
        seen: dict[Any, int] = {}
        values_E = np.zeros(len(keys))
        for place in np.argsort(of_pack.tokens_E, kind="stable"):
            i, j = calls.index(keys[place]), seen.get(keys[place], 0)
            seen[keys[place]] = j + 1
            values_E[place] = 0.1 * ((i + 2 * j) % 5) - 0.05 * j if values else 0.0
        parts.append(Part(pack=of_pack, values_E=torch.from_numpy(values_E)))
    assign(parts, algorithm)
    found: dict[str, list[Any]] = {rollout.id: [] for rollout in rollouts}
    for part in parts:
        for r, c, t, a in zip(
            part.pack.rollouts_E, part.pack.calls_E, part.pack.tokens_E, part.pack.advantages_E, strict=True
        ):
            found[part.pack.rollout_ids[r]].append((int(c), int(t), float(a)))
    return [[advantage for _, _, advantage in sorted(found[rollout.id])] for rollout in rollouts]


@pytest.mark.parametrize(
    ("workflow", "arguments", "values", "expected"),
    [
        (Episode, {}, False, PPO),
        (Episode, {}, True, PPO_VALUES),
        (Episode, {"gamma": 0.9, "lam": 0.8}, True, PPO_VALUES_GAMMA_LAMBDA),
        (OwnRewards, {"gamma": 0.9, "lam": 0.8}, True, PPO_OWN_VALUES_GAMMA_LAMBDA),
    ],
)
def test_ppo_of_a_trinity_file(
    make_place: MakePlace, workflow: Any, arguments: Any, values: bool, expected: list[list[float]]
) -> None:
    found = of_tokens(groups_of(make_place, workflow), algorithm("ppo", advantage_fn_args=arguments), values)
    for of_rollout, of_trinity in zip(found, expected, strict=True):
        assert of_rollout == pytest.approx(of_trinity, abs=1e-6)


def test_call_by_call_or_over_the_rollout_is_the_same_without_discount(make_place: MakePlace) -> None:
    """With γ = λ = 1 and one reward; not with λ 0.5, where the following call's values count."""
    groups = groups_of(make_place, OnlyStates)
    for lam, same in ((1.0, True), (0.5, False)):
        arguments = {"lam": lam, "whiten": False}
        over = of_tokens(groups, replace(PRESETS["ppo"], advantage_args=arguments))
        call_by_call = of_tokens(groups, replace(PRESETS["ppo"], advantage="call_gae", advantage_args=arguments))
        flat, flat_by_call = [[a for of_rollout in found for a in of_rollout] for found in (over, call_by_call)]
        assert (flat == pytest.approx(flat_by_call, abs=1e-6)) == same


OWN_REWARDS_OVER_TOKENS = [
    [-0.4667306, -0.4667306, -0.4667306, 2.4090672],
    [-0.4667306, -0.8354226],
    [0.4549995, 1.3767295],
    [-0.4667306, -0.0058655, -0.4667306],
]


@pytest.mark.parametrize(
    ("workflow", "expected"),
    [
        (Episode, [[1.0978972] * 4, [-1.1585032] * 2, [0.3799517] * 2, [-0.9020941] * 3]),
        (OwnRewards, OWN_REWARDS_OVER_TOKENS),
    ],
)
def test_reinforceplusplus_of_a_trinity_file_is_whitened_over_tokens(
    make_place: MakePlace, workflow: Any, expected: list[list[float]]
) -> None:
    found = of_calls(groups_of(make_place, workflow), algorithm("reinforceplusplus"))
    for of_rollout, of_trinity in zip(found, expected, strict=True):
        assert of_rollout == pytest.approx(of_trinity, abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [[1.05653858] * 4, [-1.05653846] * 2, [0.60030597] * 2, [-0.60030597] * 3]),
        (
            {"enable_step_norm": True},
            [[0.26413465] * 4, [-0.52826923] * 2, [0.30015299] * 2, [-0.20010199] * 3],
        ),
    ],
)
def test_std_cal_level_batch_of_a_trinity_file(make_place: MakePlace, keys: Any, expected: Any) -> None:
    found = of_calls(
        groups_of(make_place), algorithm("multi_step_grpo", advantage_fn_args={"std_cal_level": "batch", **keys})
    )
    for of_rollout, of_trinity in zip(found, expected, strict=True):
        assert of_rollout == pytest.approx(of_trinity, abs=1e-6)


def test_std_cal_level_batch_divides_by_the_deviation_of_all_rewards() -> None:
    """Two tasks, one easy and one hard, so that rewards differ far more over the step than within a group."""
    from sharpen.learning.algorithm.returns import Scores

    chosen = algorithm("grpo", advantage_fn_args={"std_cal_level": "batch"})
    rewards = [1.0, 0.9, 1.0, 0.95, 0.1, 0.0, 0.05, 0.0]
    found = chosen.advantages(Scores.of_rollouts(rewards, [0] * 4 + [1] * 4))
    of_trinity = [0.0755413, -0.1259024, 0.0755413, -0.02518055, 0.12590228, -0.07554137, 0.02518045, -0.07554137]
    assert found.tolist() == pytest.approx(of_trinity, abs=1e-6)


def test_sapo_of_a_trinity_file() -> None:
    """Loss and gradient, as the mean over four tokens; the second has τ 0.5 and 2."""
    chosen = algorithm("sapo")
    old, advantages = torch.tensor([-1.0, -0.7, -1.5, -0.1]), torch.tensor([1.0, 1.0, -2.0, -0.5])
    now = torch.tensor([-1.0, -0.5, -2.0, -0.1], requires_grad=True)
    function = POLICY_LOSSES[chosen.policy_loss].function
    loss = function(now, old, advantages, **chosen.policy_loss_args)[0].mean()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.7630420923, abs=1e-6)
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-0.5, -0.5551256537, 0.7583976984, 0.2380952537], abs=1e-6)
    chosen = algorithm("sapo", policy_loss_fn_args={"tau_pos": 0.5, "tau_neg": 2.0})
    loss = function(now.detach(), old, advantages, **chosen.policy_loss_args)[0].mean()
    assert float(loss) == pytest.approx(0.8894944191, abs=1e-6)


@pytest.mark.parametrize("name", ["ppo", "reinforceplusplus", "sapo", "gigpo"])
def test_what_an_argument_puts_in_the_place_of_a_files_algorithm_has_nothing_of_it(name: str) -> None:
    content: Mapping[str, Any] = {
        "model": {"model_path": "m", "max_model_len": 512},
        "algorithm": {"algorithm_type": name, "repeat_times": 2},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl", "default_workflow_type": "math_workflow"}}},
    }
    file = convert(content, "f.yaml", environment={})
    other = algorithm_of(resolve(file, {"algorithm.algorithm_type": "rloo"}).config)
    assert replace(other, shaping=PRESETS["rloo"].shaping) == PRESETS["rloo"]
    part = resolve(file, {"loss.advantage": "grpo", "loss.policy_loss": "sapo"}).config
    assert (algorithm_of(part).advantage_args, algorithm_of(part).policy_loss_args) == ({}, {})


class Climb(StepWiseRewardWorkflow):
    """Two calls in each step but the second, which makes none."""

    max_step_num = 3

    def step(self, step_num: int) -> bool:
        for word in "ab" if step_num != 1 else "":
            self.model.chat([{"role": "user", "content": f"{word} {step_num}"}])
        return True

    def reward(self, exps: Any, step_num: int) -> float:
        return [0.25, 0.5, 1.0][step_num]


class NotesItself(Climb):
    def reward(self, exps: Any, step_num: int) -> float:
        if exps:
            exps[0].info["step_reward"] = 8.0
        return 0.5


def test_a_reward_of_a_step_counts_once_however_many_calls_the_step_made(make_place: MakePlace) -> None:
    place = make_place("yes")
    rollout = place.one(Climb)
    assert dict(rollout.step_rewards) == {1: 0.75, 3: 1.0}  # the second step's goes to the call before it
    assert (rollout.reward, dict(rollout.call_rewards)) == (1.0, {0: 0.25, 1: 0.25, 2: 1.0, 3: 1.0})
    assert dict(place.one(NotesItself).step_rewards) == {0: 8.0, 1: 0.5, 2: 8.0}


class Bad(Workflow):
    """Notes what `workflow_args` say."""

    def run(self) -> Any:
        self.model.chat([{"role": "user", "content": "?"}])
        exps = self.model.extract_experience_from_history()
        exps[0].reward, exps[0].info["step_reward"] = 1.0, self.task.workflow_args["value"]
        return exps


def test_a_reward_of_a_step_is_a_finite_number(make_place: MakePlace) -> None:
    place = make_place("yes")
    rollout = place.one(Bad, workflow_args={"value": float("nan")})
    assert rollout.reward is None
    assert "exp.info['step_reward'] to nan: it must be a finite number" in str(rollout.error)
    assert dict(place.one(Bad, workflow_args={"value": np.float32(0.5)}).step_rewards) == {0: 0.5}
    with pytest.raises(ConfigError, match=r"exp.info\['step_reward'\] to 'high' \(str\): it must be a number"):
        place.one(Bad, workflow_args={"value": "high"})


def test_rewards_that_differ_without_being_of_steps_are_said(make_place: MakePlace, caplog: Any) -> None:
    from sharpen.compat.trinity import workflow_function
    from sharpen.compat.trinity.task import TasksetConfig

    place = make_place("a long answer, cut")
    with caplog.at_level(logging.WARNING, "sharpen.workflow"):
        place.run(workflow_function(Climb, TasksetConfig(), {}, "gigpo", True), {"prompt": "first"})
        assert caplog.messages == []
        place.run(workflow_function(OwnRewards, TasksetConfig(), {}, "gigpo", True), {"prompt": "first"})
    assert "a reward of a step goes into exp.info['step_reward']" in caplog.messages[0]
