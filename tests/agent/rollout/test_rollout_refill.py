"""Exact refill: as many further groups as are missing, until there are enough or the bound is reached."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.agent.rollout.refill import StepRollouts, roll_out
from sharpen.errors import RolloutError
from sharpen.types import Group, Task


class Supply:
    """Gives groups whose ids say whether they train; notes what was asked for."""

    def __init__(self, trains: list[bool]) -> None:
        self.left = list(trains)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, count: int, refill_round: int) -> list[Group]:
        self.asked.append((count, refill_round))
        taken, self.left = self.left[:count], self.left[count:]
        assert len(taken) == count
        number = sum(asked for asked, _ in self.asked[:-1])
        return [
            Group(id=f"{number + i}/{train}", task=Task(id=str(i), index=i, row={}), version=0, rollouts=())
            for i, train in enumerate(taken)
        ]


def gather(supply: Supply, batch_size: int, max_refill_tasks: int) -> StepRollouts:
    return roll_out(
        supply,
        lambda group: group.id.endswith("True"),
        batch_size=batch_size,
        max_refill_tasks=max_refill_tasks,
        check=lambda groups: None,
    )


def test_rounds_ask_for_exactly_what_is_missing() -> None:
    """4 wanted; 1 of the first 4 trains, then 1 of 3, then 2 of 2."""
    supply = Supply([True, False, False, False, False, True, False, True, True])
    found = gather(supply, 4, 100)
    assert supply.asked == [(4, 0), (3, 1), (2, 2)]
    assert (found.usable, found.refill_tasks, found.refill_rounds) == (4, 5, 2)
    assert [group.id.split("/")[0] for group in found.groups] == [str(i) for i in range(9)]
    assert found.metrics()["refill/tasks"] == 5.0
    assert found.note().startswith("refilled with 5 further tasks in 2 rounds (")
    assert found.note().endswith(" s)")


def test_groups_at_a_side_are_not_counted() -> None:
    """Red where the groups of a step are all counted: then the side groups, which train, are two of the four wanted."""
    supply = Supply([True, True, False, True, True])

    def draw(count: int, refill_round: int) -> list[Group]:
        found = supply(count, refill_round)
        return [part for group in found for part in (group, replace(group, id=f"{group.id}~True", beside=group.id))]

    found = roll_out(
        draw, lambda group: group.id.endswith("True"), batch_size=4, max_refill_tasks=9, check=lambda groups: None
    )
    assert supply.asked == [(4, 0), (1, 1)]
    assert (found.usable, found.refill_tasks, len(found.groups)) == (4, 1, 10)
    assert [group.id for group in found.further()] == ["4/True", "4/True~True"]


def test_refill_stops_at_the_bound_and_reports_it() -> None:
    supply = Supply([False] * 7)
    found = gather(supply, 4, 3)
    assert supply.asked == [(4, 0), (3, 1)]
    assert found.note().endswith("s): 0 of 4 groups train")


def test_without_anything_missing_or_without_a_bound_nothing_is_refilled() -> None:
    for supply, max_refill_tasks in ((Supply([True] * 4), 9), (Supply([False] * 4), 0)):
        found = gather(supply, 4, max_refill_tasks)
        assert supply.asked == [(4, 0)]
        assert (found.refill_tasks, found.note(), found.refill_s) == (0, "", 0.0)


def test_failing_rollouts_stop_it_before_more_are_made() -> None:
    def check(groups: list[Group]) -> None:
        raise RolloutError(f"{len(groups)} groups failed")

    supply = Supply([False] * 8)
    with pytest.raises(RolloutError, match="4 groups failed"):
        roll_out(supply, lambda group: False, batch_size=4, max_refill_tasks=4, check=check)
    assert supply.asked == [(4, 0)]


@given(
    trains=st.lists(st.booleans(), min_size=200, max_size=200),
    batch_size=st.integers(1, 20),
    max_refill_tasks=st.integers(0, 90),
)
def test_never_more_groups_than_asked_for_and_fewer_only_at_the_bound(
    trains: list[bool], batch_size: int, max_refill_tasks: int
) -> None:
    found = gather(Supply(trains), batch_size, max_refill_tasks)
    assert found.usable == sum(trains[: len(found.groups)]) <= batch_size
    assert found.refill_tasks <= max_refill_tasks
    assert found.usable == batch_size or found.refill_tasks == max_refill_tasks
