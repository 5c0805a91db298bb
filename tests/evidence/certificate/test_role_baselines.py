"""The certificate follows the baselines of roles over the steps of a run by a formula of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from experience_builders import make_call, make_group, make_rollout, rules_of
from planted_run import resolved

from sharpen.evidence.certificate.audit import audit
from sharpen.evidence.certificate.delivery import delivery
from sharpen.evidence.certificate.role_baselines import RoleBaselines
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.shaping import Shaping
from sharpen.learning.experience.draw import draw_batches, roles_after
from sharpen.types import Group, Task

ROLES = ("game", "player")
RAE = Algorithm(name="x", advantage="rae", advantage_args={"roles": ROLES, "decay": 0.8}, source="")
RULES = rules_of(RAE, group_size=2)


def a_group(name: str, player: int, rewards: tuple[float | None, ...]) -> Group:
    rollouts = [
        make_rollout(
            [make_call(0, [1, 2], [3] * (index + 1), versions_S=np.zeros(index + 1, np.int32))], reward, name, index
        )
        for index, reward in enumerate(rewards)
    ]
    group = make_group(rollouts, name, version=0)
    return replace(group, task=Task(id=group.task.id, index=0, row={"game": "poker", "player": player}))


def steps(seed: int = 0, count: int = 6) -> list[list[Group]]:
    """Steps of three groups of two roles; in some steps one role does not play."""
    chance = np.random.default_rng(seed)
    return [
        [
            a_group(f"{step}/{task}", int(chance.integers(2)), tuple(chance.normal(size=2).round(2).tolist()))
            for task in range(3)
        ]
        for step in range(count)
    ]


def broken(
    groups: list[Group], roles: Mapping[str, float], baselines: Mapping[str, float], algorithm: Algorithm = RAE
) -> dict[str, str | None]:
    delivered = delivery(draw_batches(groups, algorithm, 1, roles))
    rules = rules_of(algorithm, group_size=2)
    found = audit(groups, delivered, rules, version=0, baselines=baselines)
    return {check.name: check.first for check in found if check.broken}


@pytest.mark.parametrize("shaping", [Shaping(), Shaping(max_length=2, cache=1, penalty=0.5)])
def test_baselines_are_followed_over_the_steps(shaping: Shaping) -> None:
    """Red when either side starts elsewhere, takes the rewards of another role, or weighs them otherwise."""
    algorithm = replace(RAE, shaping=shaping)
    rules = rules_of(algorithm, group_size=2)
    roles: Mapping[str, float] = {}
    known = RoleBaselines()
    for number, groups in enumerate(steps(), 1):
        before = known.before(number, groups, rules)
        for group in groups:
            assert before[group.id] == pytest.approx(roles.get(algorithm.role_of(group.task), 0.0), abs=1e-12)
        assert not broken(groups, roles, before, algorithm)
        known.learn(number, groups, delivery(draw_batches(groups, algorithm, 1, roles)), rules)
        roles = roles_after(groups, algorithm, roles)
    assert set(roles) == {"poker/0", "poker/1"}


def test_a_session_that_continues_begins_with_what_was_saved() -> None:
    roles: Mapping[str, float] = {}
    for groups in steps(1)[:4]:
        roles = roles_after(groups, RAE, roles)
    known = RoleBaselines(roles)
    for number, groups in enumerate(steps(1)[4:], 5):
        assert not broken(groups, roles, known.before(number, groups, RULES))
        known.learn(number, groups, None, RULES)
        roles = roles_after(groups, RAE, roles)


def test_baselines_that_were_not_moved_or_of_another_role_are_found() -> None:
    first, second = [a_group("a", 0, (1.0, 0.5)), a_group("b", 1, (-1.0, -0.5))], [a_group("c", 0, (1.0, 0.0))]
    known = RoleBaselines()
    known.learn(1, first, None, RULES)
    before = known.before(2, second, RULES)
    # mean 0.75 of two rewards: 0.75 (1 - 0.8^2) = 0.27
    assert before == pytest.approx({"c": 0.27})
    right = roles_after(first, RAE, {})
    assert not broken(second, right, before)
    for wrong in ({}, {"poker/0": right["poker/1"]}, {"poker/0": 0.2701}):
        assert (broken(second, wrong, before)["advantages"] or "").startswith("rollout c/0, call 0, token 2: ")


def test_a_rollout_without_a_reward_moves_nothing() -> None:
    groups = [a_group("a", 0, (1.0, None))]
    known = RoleBaselines()
    known.learn(1, groups, None, RULES)
    assert known.before(2, groups, RULES) == pytest.approx({"a": 0.2})
    assert roles_after(groups, RAE, {}) == pytest.approx({"poker/0": 0.2})


def test_steps_that_are_not_known_are_named_and_other_advantages_have_no_baselines() -> None:
    known, groups = RoleBaselines(), steps(2)[0]
    known.learn(1, groups, None, RULES)
    known.learn(3, groups, None, RULES)
    assert known.missing(5) == [2, 4]
    other = Rules.of(resolved().config)
    assert known.before(2, groups, other) == {}
