"""`sharpen show RUN --task ID`: what the agent did with a held-out task before the training, and after it.

In: `evaluations.db`, the id of a task (or a unique end of it), the mode. Out: a line for each evaluation of the task,
then the first and the last of these rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpen.agent.transcript import row_lines
from sharpen.cli.page import Page
from sharpen.cli.show_list import rollout_json
from sharpen.errors import ConfigError
from sharpen.learning.experience.reading import RolloutEntry, find_rollouts, read_groups
from sharpen.learning.experience.records import CHECK

HELD_OUT = "held-out"


def evaluations_of(evaluations: Path, task: str, mode: str) -> dict[str, RolloutEntry]:
    """Return the evaluations of a task by group. Raises `ConfigError` if none was saved, or none has the task."""
    if not evaluations.exists():
        raise ConfigError(
            f"{evaluations.parent} has no {evaluations.name}: nothing was evaluated there, or nothing was saved"
        )
    entries = [
        entry
        for entry in find_rollouts(evaluations, part=f"/{mode}/")
        if entry.id.endswith("/0") and not entry.id.startswith(f"{CHECK}/")
    ]
    names = sorted({_task(entry, mode) for entry in entries})
    chosen = [name for name in names if name == task or name.endswith(f"/{task}")]
    held_out = tuple(name for name in chosen if name.startswith(f"{HELD_OUT}/"))
    for preferred in ((task, f"{HELD_OUT}/{task}"), held_out):
        chosen = [name for name in chosen if name in preferred] or chosen
    if len(chosen) > 1:
        raise ConfigError(f"--task {task}: {len(chosen)} {mode} tasks end with it: {', '.join(chosen)}")
    if not chosen:
        raise ConfigError(
            f"--task {task}: no {mode} task has this id; there are {len(names)}, e.g. {', '.join(names[:5])}"
        )
    return {entry.group_id: entry for entry in entries if _task(entry, mode) == chosen[0]}  # the last of each name


def print_task(evaluations: Path, times: Mapping[str, RolloutEntry], page: Page) -> None:
    """Print a line for each evaluation of a task, its row, then the first and the last rollout."""
    width = max(map(len, times))
    for group_id, entry in times.items():
        reward = entry.outcome.value if entry.reward is None else f"{entry.reward:g}"
        page.line(f"{group_id:<{width}}  reward {reward}  calls {entry.num_calls}")
    for number, group_id in enumerate(dict.fromkeys((next(iter(times)), list(times)[-1]))):
        *_, group = read_groups(evaluations, group_id=group_id)
        page.line("")
        page.line(f"=== {group_id.split('/')[0].upper().replace('-', ' ')} ===", "bold")
        row = () if number else tuple(row_lines(group.task.row))
        page.rollout(group.rollouts[0], only=None, tokens=False, row=row)


def task_json(evaluations: Path, times: Mapping[str, RolloutEntry]) -> list[dict[str, Any]]:
    """Return each evaluation of a task as JSON, in the order of the run."""
    groups = [list(read_groups(evaluations, group_id=group_id))[-1] for group_id in times]
    return [rollout_json(group, group.rollouts[0]) for group in groups]


def _task(entry: RolloutEntry, mode: str) -> str:
    """Return the dataset and task of an evaluated group, whose id is `<when>/<dataset>/<mode>/<task>`."""
    before, task = entry.group_id.split(f"/{mode}/", 1)
    return f"{before.partition('/')[2]}/{task}"
