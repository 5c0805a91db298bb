"""The invariants of the run certificate by name, and how they are counted and said.

In: what a check found, thing by thing. Out: `Check`s, and sentences of the broken ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sharpen.errors import CertificateError
from sharpen.types import Check

IDS, MASK, RECORDS, MEANS, STALENESS = "ids", "loss_mask", "records", "group_means", "staleness"
REPLAY, FAILURES, ACCOUNTED, GROUPS, WEIGHTS = "replay", "failures", "accounted", "groups", "weights"
TAKES_PART, ADVANTAGES, TOKEN_WEIGHTS = "takes_part", "advantages", "token_weights"
UPDATES, OWNERS = "updates", "owners"
MEANING: Mapping[str, str] = {
    IDS: "the ids trained on are the ids that were prompted and sampled",
    MASK: "every sampled token of every trainable call carries loss exactly once, and nothing else does",
    RECORDS: "logprob, version and temperature of every loss token are the recorded ones, and finite",
    TAKES_PART: "every trainable call of every rollout that takes part is trained, and no other call is",
    ADVANTAGES: "the advantage of every token is what the recorded rewards give it",
    TOKEN_WEIGHTS: "every token weighs what the aggregation gives it, normalized once over its whole update",
    UPDATES: "every group is in the update that its place in the step gives it",
    MEANS: "advantages add up to zero over every group",
    STALENESS: "no token is older than allowed, and none is newer than the weights that train",
    REPLAY: "every group that trains again is whole, of an earlier policy version, and in the step once",
    FAILURES: "no failed rollout is in the statistics or the loss",
    OWNERS: "no rollout takes part that holds a call made from another rollout's context",
    ACCOUNTED: "every rollout that was asked for is there, once",
    GROUPS: "every group that was rolled out is trained, or left out for the reason that its rewards give",
    WEIGHTS: "every rollout with a trainable call weighs more than nothing",
}
"""The invariants by name."""

MEANING_OF_ROWS: Mapping[str, str] = {
    "rows": "every row that was drawn is trained exactly once, or was left out for its length",
    "mask": "loss is on the assistant's turns, each whole and with its end token, and on nothing else",
    "rendered": "the trained ids spell what the chat template writes for the conversation",
    "pairs": "both answers of a pair are in the same update",
}
"""Those of a run without rollouts (`supervised.checks`)."""


def sentence(check: Check) -> str:
    """A broken check for people."""
    meaning = MEANING[check.name] if check.name in MEANING else MEANING_OF_ROWS[check.name]
    return f"{check.name}: {meaning}; {check.broken} of {check.checked} do not, first {check.first}"


def broken_sentences(checks: Sequence[Check], *, stop: bool) -> list[str]:
    """The broken checks for people. Raises `CertificateError` with them instead if `stop`."""
    broken = [sentence(check) for check in checks if check.broken]
    if broken and stop:
        raise CertificateError(
            "the run certificate is broken, and nothing was trained on it: "
            + "; ".join(broken)
            + " (certificate.on_violation: warn goes on all the same)"
        )
    return broken


@dataclass(slots=True)
class CheckTally:
    """What was looked at, and what was wrong with it, by the invariant's name."""

    checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEANING, 0))
    broken: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in MEANING})

    def look(self, name: str, broken: str | None, count: int = 1) -> None:
        """Note that `count` things were looked at, and what was wrong, if anything."""
        self.checked[name] += count
        if broken is not None:
            self.broken[name].append(broken)

    def checks(self) -> tuple[Check, ...]:
        """One check for each invariant."""
        return tuple(
            Check(
                name=name,
                checked=self.checked[name],
                broken=len(self.broken[name]),
                first=next(iter(self.broken[name]), None),
            )
            for name in MEANING
        )
