"""Which groups of earlier steps train again, drawn once more from the record.

In: step by step the groups that trained, with the advantages of their calls. Out: the ids that the seed draws for a
step. Odds are those of `docs/use/sampling.md`; the draw is the weighted one without replacement of Efraimidis and
Spirakis.

Shape suffix: N groups in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sharpen.certificate.expectation import ExpectedCall, carries_loss, has_part
from sharpen.certificate.rules import Rules
from sharpen.types import Group

_STREAM = 4
"""The number of this stream of random numbers, beside seed and step."""
_EXPONENT = 0.6


@dataclass(slots=True)
class _Entry:
    oldest: int
    signal: float
    uses: int


@dataclass(slots=True)
class Memory:
    """What may train again, in the order in which it first trained."""

    kept: dict[str, _Entry] = field(default_factory=dict)

    def draw(self, step: int, version: int, rules: Rules, max_staleness: int) -> list[str]:
        """The ids that the seed draws for a step, the first drawn first."""
        self.kept = {id_: one for id_, one in self.kept.items() if version - one.oldest <= max_staleness}
        if not self.kept or not rules.replayed_groups:
            return []
        odds_N = np.array(
            [
                (one.signal**_EXPONENT if rules.replay_by_signal else 1.0)
                * (1.0 - (version - one.oldest) / (max_staleness + 1))
                / 2.0 ** (one.uses - 1)
                for one in self.kept.values()
            ]
        )
        uniform_N = np.random.default_rng([rules.seed, step, _STREAM]).random(len(odds_N))
        order_N = np.argsort(-np.log1p(-uniform_N) / odds_N, kind="stable")
        ids = list(self.kept)
        return [ids[place] for place in order_N[: rules.replayed_groups].tolist()]

    def keep(self, groups: Sequence[Group], trained: Iterable[ExpectedCall], rules: Rules) -> None:
        """Note that these groups trained: with which mean absolute advantage, and how often. Those without one go."""
        sizes: dict[str, list[float]] = {}
        for call in trained:
            size = abs(float(np.float32(call.advantage)))
            sizes.setdefault(call.group_id, []).append(size if size > call.slack else 0.0)
        for group in groups:
            found = sizes.get(group.id, [])
            signal = math.fsum(found) / len(found) if found else 0.0
            if signal <= 0.0:
                self.kept.pop(group.id, None)
            elif group.id in self.kept:
                self.kept[group.id].signal, self.kept[group.id].uses = signal, self.kept[group.id].uses + 1
            else:
                self.kept[group.id] = _Entry(_oldest(group, rules), signal, 1)


def _oldest(group: Group, rules: Rules) -> int:
    """The version of the group's oldest trainable token."""
    versions = [
        int(call.versions_S.min())
        for rollout in group.rollouts
        for call in (rollout.calls if has_part(rollout, rules) else ())
        if carries_loss(call)
    ]
    return min(versions, default=group.version)
