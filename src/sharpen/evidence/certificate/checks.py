"""The invariants of the run certificate by name, and how results are counted and worded.

In: the result of each single check. Out: `Check`s, and sentences about the broken ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sharpen.errors import CertificateError
from sharpen.types import Check

IDS, MASK, RECORDS, MEANS, STALENESS = "ids", "loss_mask", "records", "group_means", "staleness"
REPLAY, FAILURES, ACCOUNTED, GROUPS, WEIGHTS = "replay", "failures", "accounted", "groups", "weights"
TAKES_PART, ADVANTAGES, TOKEN_WEIGHTS = "takes_part", "advantages", "token_weights"
UPDATES, OWNERS, POLICIES = "updates", "owners", "policies"
MEANING: Mapping[str, str] = {
    IDS: "the ids trained on are the ids that were prompted and sampled, with their images",
    MASK: "every sampled token of every trainable call carries loss exactly once, and nothing else does",
    RECORDS: "logprob, version, temperature and experts of every loss token are the recorded ones, and finite",
    TAKES_PART: "every trainable call of every rollout that takes part is trained, and no other call is",
    ADVANTAGES: "the advantage of every token follows from the recorded rewards",
    TOKEN_WEIGHTS: "the weight of every token follows from the aggregation, normalized once over its whole update",
    UPDATES: "every group is in the update that its position in the step determines",
    MEANS: "advantages add up to zero over every group",
    STALENESS: "no token is older than allowed, and none is newer than the weights that train",
    REPLAY: "every replayed group is whole, from an earlier policy version, and in the step once",
    FAILURES: "no failed rollout is in the statistics or the loss",
    OWNERS: "no rollout with a call made from another rollout's context takes part",
    POLICIES: "every call of an agent with a policy of its own has that policy's version, and none of them trains",
    ACCOUNTED: "every requested rollout is there exactly once",
    GROUPS: "every group that was rolled out is trained, or left out for a reason that its rewards confirm",
    WEIGHTS: "every rollout with a trainable call has a positive weight",
}
"""What each invariant asserts, by its name."""

MEANING_OF_ROWS: Mapping[str, str] = {
    "rows": "every drawn row is trained exactly once, or left out because of its length",
    "mask": "loss is on the assistant's turns, each complete with its end token, and on nothing else",
    "rendered": "the trained ids decode to what the chat template renders for the conversation",
    "pairs": "both answers of a pair are in the same update",
}
"""The invariants of a run without rollouts (`supervised.checks`)."""


DRAWS = "draws"
MEANING_OF_DRAWS: Mapping[str, str] = {
    DRAWS: "the tokens are drawn from the recorded distributions, each rollout's by noise of its own",
}
"""What is tested of a step after its update (`draws`)."""


def sentence(check: Check) -> str:
    """Describe a broken check in a sentence."""
    if check.name == DRAWS:
        return f"{check.name}: {MEANING_OF_DRAWS[check.name]}; broken: {check.first}"
    meaning = MEANING[check.name] if check.name in MEANING else MEANING_OF_ROWS[check.name]
    return f"{check.name}: {meaning}; broken {check.broken} of {check.checked} times, first: {check.first}"


def broken_sentences(checks: Sequence[Check], *, stop: bool, trained: bool = False) -> list[str]:
    """Return a sentence for each broken check. With `stop`, raise `CertificateError` with them instead, which says
    whether the step has `trained`."""
    broken = [sentence(check) for check in checks if check.broken]
    if broken and stop:
        raise CertificateError(
            f"the run certificate is broken, and {'the step was' if trained else 'nothing was'} trained on it: "
            + "; ".join(broken)
            + " (certificate.on_violation: warn continues anyway)"
        )
    return broken


@dataclass(slots=True)
class CheckTally:
    """How many things were checked and what was wrong with them, by the invariant's name."""

    checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEANING, 0))
    broken: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in MEANING})

    def add(self, name: str, broken: str | None, count: int = 1) -> None:
        """Count `count` checked things; `broken` describes what was wrong, None if nothing was."""
        self.checked[name] += count
        if broken is not None:
            self.broken[name].append(broken)

    def checks(self) -> tuple[Check, ...]:
        """Return one check for each invariant."""
        return tuple(
            Check(
                name=name,
                checked=self.checked[name],
                broken=len(self.broken[name]),
                first=next(iter(self.broken[name]), None),
            )
            for name in MEANING
        )
