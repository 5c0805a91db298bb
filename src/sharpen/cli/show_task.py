"""`sharpen show RUN_DIR --task ID`: a held-out task as the agent did it before the training, and after.

In: `evaluations.db`, the id of a task (or a unique end of it), the mode. Out: a line for each time that it was
evaluated, then the first and the last of them, one after the other.
"""

from __future__ import annotations

from pathlib import Path

from sharpen.cli.page import Page
from sharpen.errors import ConfigError
from sharpen.experience.reading import RolloutEntry, find_rollouts, read_groups

HELD_OUT = "held-out"


def print_task(evaluations: Path, task: str, mode: str, page: Page) -> None:
    """Raises `ConfigError` where no evaluation was kept, or no such task is in it."""
    if not evaluations.exists():
        raise ConfigError(
            f"{evaluations.parent} has no {evaluations.name}: nothing was evaluated there, or nothing was kept of it"
        )
    entries = [entry for entry in find_rollouts(evaluations, part=f"/{mode}/") if entry.id.endswith("/0")]
    names = sorted({_task(entry, mode) for entry in entries})
    chosen = [name for name in names if name == task or name.endswith(f"/{task}")]
    for better in ((task, f"{HELD_OUT}/{task}"), tuple(name for name in chosen if name.startswith(f"{HELD_OUT}/"))):
        chosen = [name for name in chosen if name in better] or chosen
    if len(chosen) != 1:
        some = ", ".join(chosen or names[:5])
        found = f"{len(chosen)} tasks end with it: {some}" if chosen else f"there are {some}, ... ({len(names)} tasks)"
        raise ConfigError(f"--task {task}: no one task that was evaluated {mode} has this id; {found}")
    times = {entry.group_id: entry for entry in entries if _task(entry, mode) == chosen[0]}  # the last of each name
    width = max(map(len, times))
    for group_id, entry in times.items():
        reward = entry.outcome.value if entry.reward is None else f"{entry.reward:g}"
        page.line(f"{group_id:<{width}}  reward {reward}  calls {entry.num_calls}")
    for group_id in dict.fromkeys((next(iter(times)), list(times)[-1])):
        *_, group = read_groups(evaluations, group_id=group_id)
        page.line("")
        page.line(f"=== {group_id.split('/')[0].upper().replace('-', ' ')} ===", "bold")
        page.rollout(group.rollouts[0], only=None, tokens=False)


def _task(entry: RolloutEntry, mode: str) -> str:
    """Set and task of an evaluated group, whose id is `<when>/<set>/<mode>/<task>`."""
    before, task = entry.group_id.split(f"/{mode}/", 1)
    return f"{before.partition('/')[2]}/{task}"
