"""Exact refill: replaces the groups of a step that cannot train with further ones, at the same policy version.

In: a function that rolls out further tasks, and one that tells whether a group trains. Out: `StepRollouts`, all groups
of the step in the order of their rollouts. Each round rolls out exactly as many tasks as groups are missing, so that no
group that could train is discarded.

Source: dynamic sampling, DAPO, arXiv 2503.14476, section 3.2 (there with rounds of whole batches and a cut surplus).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sharpen.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The groups of a step: first those of its batch, then those of `refill_rounds` refill rounds.

    `batch_size` usable groups were requested, and `usable` of the groups can train. Groups at the side of others are
    neither requested nor counted. The refill took `refill_s` of the `seconds`.
    """

    groups: tuple[Group, ...]
    batch_size: int
    usable: int
    refill_rounds: int
    seconds: float
    refill_s: float

    @property
    def refill_tasks(self) -> int:
        """How many tasks were rolled out to replace groups that cannot train."""
        return _num_tasks(self.groups) - self.batch_size

    def metrics(self) -> dict[str, float]:
        """Return the amount and cost of the refill, as numbers to log."""
        return {
            "refill/tasks": float(self.refill_tasks),
            "refill/rounds": float(self.refill_rounds),
            "refill/usable_groups": float(self.usable),
            "refill/sampled_tokens": float(sum(map(num_sampled_tokens, self.further()))),
            "refill/s": self.refill_s,
        }

    def further(self) -> Iterator[Group]:
        """Yield the groups of the refill rounds, and those at their side."""
        number = 0
        for group in self.groups:
            number += group.beside is None
            if number > self.batch_size:
                yield group

    def note(self) -> str:
        """Return one line of text about the refill; empty if there was none."""
        if not self.refill_tasks:
            return ""
        short = f": {self.usable} of {self.batch_size} groups train" if self.usable < self.batch_size else ""
        tasks = f"{self.refill_tasks} further task{'s' if self.refill_tasks > 1 else ''}"
        rounds = f"{self.refill_rounds} round{'s' if self.refill_rounds > 1 else ''}"
        return f"refilled with {tasks} in {rounds} ({self.refill_s:.1f} s){short}"


def roll_out(
    draw: Callable[[int, int], list[Group]],
    trains: Callable[[Group], bool],
    *,
    batch_size: int,
    max_refill_tasks: int,
    check: Callable[[list[Group]], None],
) -> StepRollouts:
    """Roll out tasks until `batch_size` groups train or `max_refill_tasks` further tasks were rolled out.

    `draw(count, round)` rolls out `count` tasks; round 0 is the batch itself. `check` is called with the groups before
    each refill round, and may raise.
    """
    began = time.perf_counter()
    groups = draw(batch_size, 0)
    refill_began, rounds = time.perf_counter(), 0
    usable = sum(group.beside is None and trains(group) for group in groups)
    while (count := min(batch_size - usable, max_refill_tasks - (_num_tasks(groups) - batch_size))) > 0:
        check(groups)
        rounds += 1
        further = draw(count, rounds)
        usable += sum(group.beside is None and trains(group) for group in further)
        groups = [*groups, *further]
    ended = time.perf_counter()
    return StepRollouts(
        groups=tuple(groups),
        batch_size=batch_size,
        usable=usable,
        refill_rounds=rounds,
        seconds=ended - began,
        refill_s=ended - refill_began if rounds else 0.0,
    )


def _num_tasks(groups: Sequence[Group]) -> int:
    return sum(group.beside is None for group in groups)


def num_sampled_tokens(group: Group) -> int:
    """Return the number of tokens sampled for a group, including failed attempts and its baseline."""
    rollouts = (*group.with_baseline, *group.attempts)
    return sum(len(call.sampled_ids_S) for rollout in rollouts for call in rollout.calls)
