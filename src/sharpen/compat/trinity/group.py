"""Whose each experience is, where one run of a workflow made all rollouts of a group (`can_repeat`).

In: the experiences that it returned, the group's size. Out: those of each rollout, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from sharpen.compat.trinity.experience import Experience
from sharpen.errors import ConfigError


def by_run(name: str, experiences: Sequence[Experience], group_size: int) -> list[list[Experience]]:
    """The experiences of each run, by `eid.run` from 0 on. Where none was set, as many as there are runs are one each.

    Raises `ConfigError` for a run that was not asked for and for a call in two runs, `ValueError` for a number of
    experiences that does not say whose they are.
    """
    runs = [experience.eid.run for experience in experiences]
    if group_size > 1 and experiences and not any(runs):
        if len(experiences) != group_size:
            raise ValueError(
                f"workflow {name} returned {len(experiences)} experiences for {group_size} runs (set_repeat_times) "
                "without saying whose they are: set exp.eid.run, from self.run_id_base on, or return one for each run"
            )
        runs = list(range(group_size))
    parts: list[list[Experience]] = [[] for _ in range(group_size)]
    owners: dict[int, int] = {}
    for run, experience in zip(runs, experiences, strict=True):
        if not 0 <= run < group_size:
            raise ConfigError(
                f"workflow {name} returned an experience of run {run} (exp.eid.run), but set_repeat_times asked for "
                f"{group_size} runs from 0 on"
            )
        for call in experience.calls:
            if owners.setdefault(call.index, run) != run:
                raise ConfigError(
                    f"workflow {name} returned call {call.index} in run {owners[call.index]} and in run {run} "
                    "(exp.eid.run): a call is of one run"
                )
        parts[run].append(experience)
    return parts
