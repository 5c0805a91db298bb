"""How far a run is: everything that a resumed run needs to know, with the results of the evaluations.

In: the loop's counts. Out: JSON in every checkpoint, which is read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpen.show.monitor.statistics import Evaluation, evaluation_from_json, evaluation_to_json
from sharpen.show.monitor.verdict import RowLosses, is_best, is_best_loss
from sharpen.types import Mode

_MEASURED = ("before", "after", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The results of an evaluation: the agent's rewards, the metrics of the held-out rows (`loss`), and each row's
    losses. A part that was not evaluated is None; at least one is set."""

    rewards: Evaluation | None = None
    loss: Mapping[str, float] | None = None
    rows: RowLosses | None = None

    def is_best(self, best: Measurement | None, before: Measurement | None, decided_by: Mode) -> bool:
        """Whether this checkpoint becomes `best`: by the agent's rewards, else by the held-out loss."""
        best, before = best or Measurement(), before or Measurement()
        if self.rewards is not None:
            return is_best(self.rewards, best.rewards, before.rewards, decided_by)
        assert self.rows is not None
        return is_best_loss(self.rows, best.rows, before.rows)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        rewards = None if self.rewards is None else evaluation_to_json(self.rewards)
        return {"rewards": rewards, "loss": self.loss, "rows": self.rows}

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> Measurement | None:
        """Read the JSON; None stays None."""
        if content is None:
            return None
        rewards = content.get("rewards")
        return cls(
            rewards=None if rewards is None else evaluation_from_json(rewards),
            loss=content.get("loss"),
            rows=content.get("rows"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is. Saved in every checkpoint; counts are over all its sessions. `version` is the policy version
    after `step`. `best` holds the results of the checkpoint of `best_step` (None if none was better than the original
    model), and `num_evaluated` counts the evaluations of checkpoints. `drawn` has the tasks of each batch that was
    started but not trained, `roles` the baselines of roles after `step`."""

    step: int = 0
    version: int = 0
    rollouts: int = 0
    sampled_tokens: int = 0
    rows: int = 0
    rows_too_long: int = 0
    trained_tokens: int = 0
    computed_tokens: int = 0
    seconds_to_first_step: float | None = None
    best: Measurement | None = None
    best_step: int | None = None
    num_evaluated: int = 0
    before: Measurement | None = None
    after: Measurement | None = None
    order: Mapping[str, Any] = field(default_factory=dict)
    drawn: Sequence[Sequence[int]] = ()
    expert: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, float] = field(default_factory=dict)
    auxiliary_tokens: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        content = {name: getattr(self, name) for name in self.__slots__}
        for name in _MEASURED:
            content[name] = None if content[name] is None else content[name].to_json()
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Progress:
        """Read the JSON."""
        fields = {name: value for name, value in content.items() if name in cls.__slots__}
        for name in _MEASURED:
            fields[name] = Measurement.from_json(fields.get(name))
        return cls(**fields)
