"""The moving baselines of roles (`rae`), a second time: from the rewards of all steps before.

In: the steps, with their groups. Out: what the rollouts of a group are compared with. Nothing is carried from step to
step but rewards: a baseline is the sum of all means, newest first, each with the weight that later rewards left it.
Written out from `docs/reference/algorithms.md`; nothing is shared with `algorithm.role_baseline`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sharpen.evidence.certificate.expectation import TRAINED, expect
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.experience.records import Delivery
from sharpen.types import Group

NO_BASELINE = "it compares with baselines that follow from the rewards of all steps before, of which"
"""Begins a sentence about a step whose earlier steps are not all there."""
_SPENT = 1e-18
"""What is left of a baseline before so many rewards that nothing of it shows."""


class RoleBaselines:
    """The rewards of each role by step. `begun` are baselines to begin with, where a session continues a run: only from
    the records of the whole run can they be computed again."""

    def __init__(self, begun: Mapping[str, float] | None = None) -> None:
        self._begun = dict(begun or {})
        self._steps: dict[int, dict[str, list[float]]] = {}

    def before(self, step: int, groups: Sequence[Group], rules: Rules) -> dict[str, float]:
        """Return the baseline of each group's role before a step, by group id; nothing for other advantages."""
        if not rules.formula.by_role:
            return {}
        roles = {group.id: _role(group, rules) for group in groups}
        known = {role: self._baseline(role, step, rules.arguments.get("decay", 0.95)) for role in set(roles.values())}
        return {id_: known[role] for id_, role in roles.items()}

    def learn(self, step: int, groups: Sequence[Group], delivered: Delivery | None, rules: Rules) -> None:
        """Add the rewards of a step; `delivered` says which of its groups trained, where their rewards allow both."""
        if not rules.formula.by_role:
            return
        places = () if delivered is None else delivered.places
        trained = expect(groups, (), rules, {one.group_id: one.left_out or TRAINED for one in places}).rewards
        self._steps[step] = {}
        for group in groups:
            self._steps[step].setdefault(_role(group, rules), []).extend(trained.get(group.id, ()))

    def missing(self, step: int) -> list[int]:
        """Return the steps before this one whose rewards are not known."""
        return [earlier for earlier in range(1, step) if earlier not in self._steps]

    def _baseline(self, role: str, step: int, decay: float) -> float:
        weight, total = 1.0, 0.0
        for earlier in sorted((one for one in self._steps if one < step), reverse=True):
            rewards = self._steps[earlier].get(role)
            if not rewards:
                continue
            left = weight * math.pow(decay, len(rewards))
            total += (weight - left) * math.fsum(rewards) / len(rewards)
            weight = left
            if weight < _SPENT:
                break
        return total + weight * self._begun.get(role, 0.0)


def _role(group: Group, rules: Rules) -> str:
    return "/".join(str(group.task.row.get(name)) for name in rules.arguments.get("roles", ()))
