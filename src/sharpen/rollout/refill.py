"""Exact refill: for the groups of a step that cannot train, further ones, at the same policy version.

In: a way to roll out a number of further tasks, and to tell which groups train. Out: `StepRollouts`, all groups of the
step in the order they were rolled out. Each round rolls out exactly as many tasks as groups are missing, so that no
group that could train is ever thrown away.

Source: dynamic sampling, DAPO, arXiv 2503.14476, section 3.2 (there rounds of whole batches, and the surplus is cut).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sharpen.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The groups of a step: those of its first tasks, then those of `refill_rounds` further rounds, which took
    `refill_s` of the `seconds`. `usable` of them can train; `batch_size` were asked for."""

    groups: tuple[Group, ...]
    batch_size: int
    usable: int
    refill_rounds: int
    seconds: float
    refill_s: float

    @property
    def refill_tasks(self) -> int:
        """Tasks that were rolled out in place of groups that were left out."""
        return len(self.groups) - self.batch_size

    def metrics(self) -> dict[str, float]:
        """What was refilled and what it cost, as numbers to log."""
        return {
            "refill/tasks": float(self.refill_tasks),
            "refill/rounds": float(self.refill_rounds),
            "refill/usable_groups": float(self.usable),
            "refill/sampled_tokens": float(sum(num_sampled_tokens(group) for group in self.groups[self.batch_size :])),
            "refill/s": self.refill_s,
        }

    def note(self) -> str:
        """One line for people; empty where nothing was refilled."""
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
    most: int,
    check: Callable[[list[Group]], None],
) -> StepRollouts:
    """`draw(count, round)` rolls out so many tasks (round 0: the batch itself), until `batch_size` groups train or
    `most` further tasks were rolled out. `check` sees the groups before each further round, and may raise."""
    began = time.perf_counter()
    groups = draw(batch_size, 0)
    refill_began, rounds = time.perf_counter(), 0
    usable = sum(map(trains, groups))
    while (count := min(batch_size - usable, most - (len(groups) - batch_size))) > 0:
        check(groups)
        rounds += 1
        further = draw(count, rounds)
        usable += sum(map(trains, further))
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


def num_sampled_tokens(group: Group) -> int:
    """Tokens that the engine sampled for a group, failed attempts and its baseline included."""
    rollouts = (*group.with_baseline, *group.attempts)
    return sum(len(call.sampled_ids_S) for rollout in rollouts for call in rollout.calls)
