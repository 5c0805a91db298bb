"""Draw the replayed groups of each step a second time, from the records.

In: step by step the groups that trained, with the advantages of their calls. Out: the ids that the seed draws for a
step. The odds are those of `docs/use/sampling.md`; the draw is the weighted sampling without replacement of Efraimidis
and Spirakis.

Shape suffix: N groups in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sharpen.evidence.certificate.expectation import ExpectedCall, carries_loss, is_eligible
from sharpen.evidence.certificate.rules import Rules
from sharpen.types import Group

_STREAM = 4
"""The number of this stream of random numbers, next to seed and step."""
_EXPONENT = 0.6


@dataclass(slots=True)
class _Entry:
    oldest: int
    signal: float
    uses: int


@dataclass(slots=True)
class Memory:
    """The groups that may be replayed, in the order in which they first trained."""

    kept: dict[str, _Entry] = field(default_factory=dict)

    def draw(self, step: int, version: int, rules: Rules, max_staleness: int) -> list[str]:
        """Return the ids that the seed draws for a step, in the order drawn."""
        self.kept = {id_: entry for id_, entry in self.kept.items() if version - entry.oldest <= max_staleness}
        if not self.kept or not rules.replayed_groups:
            return []
        odds_N = np.array(
            [
                (entry.signal**_EXPONENT if rules.replay_by_signal else 1.0)
                * (1.0 - (version - entry.oldest) / (max_staleness + 1))
                / 2.0 ** (entry.uses - 1)
                for entry in self.kept.values()
            ]
        )
        uniform_N = np.random.default_rng([rules.seed, step, _STREAM]).random(len(odds_N))
        order_N = np.argsort(-np.log1p(-uniform_N) / odds_N, kind="stable")
        ids = list(self.kept)
        return [ids[place] for place in order_N[: rules.replayed_groups].tolist()]

    def keep(self, groups: Sequence[Group], trained: Iterable[ExpectedCall], rules: Rules) -> None:
        """Record that these groups trained: add one to their uses and update their mean absolute advantage. Groups
        whose mean is 0 are dropped. A run without replay keeps none."""
        if not rules.replayed_groups:
            return
        sizes: dict[str, list[float]] = {}
        for call in trained:
            assert call.advantage is not None, "a run that replays has a second formula of its advantage"
            size = abs(float(np.float32(call.advantage)))
            sizes.setdefault(call.group_id, []).append(size if size > call.slack else 0.0)
        for group in groups:
            of_group = sizes.get(group.id, [])
            signal = math.fsum(of_group) / len(of_group) if of_group else 0.0
            if signal <= 0.0:
                self.kept.pop(group.id, None)
            elif group.id in self.kept:
                self.kept[group.id].signal, self.kept[group.id].uses = signal, self.kept[group.id].uses + 1
            else:
                self.kept[group.id] = _Entry(_oldest(group, rules), signal, 1)


def _oldest(group: Group, rules: Rules) -> int:
    """Return the version of the group's oldest trainable token."""
    versions = [
        int(call.versions_S.min())
        for rollout in group.rollouts
        for call in (rollout.calls if is_eligible(rollout, rules) else ())
        if carries_loss(call)
    ]
    return min(versions, default=group.version)
