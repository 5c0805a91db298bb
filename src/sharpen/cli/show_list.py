"""`sharpen show RUN` without `--rollout`: the last groups with their rewards, or the rollouts that the filters choose;
or with `--task ID`, what the agent did with a held-out task before the training, and after it.

In: `run.db` and the filters; `evaluations.db` and the id of a task (or a unique end of it). Out: a line for each group;
or for each rollout with its last answer and its error, so that failures and the highest rewards can be read one below
the other; or a line for each evaluation of the task, then the first and the last of these rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.agent.transcript import TRIMMED, clean, last_answer, row_lines
from sharpen.cli.page import Page, print_wrapped
from sharpen.errors import ConfigError
from sharpen.learning.experience.reading import RolloutEntry, find_rollouts, read_groups
from sharpen.learning.experience.records import CHECK
from sharpen.screen import command_lines
from sharpen.serve.record.folder import is_record, summary
from sharpen.types import step_of_group

if TYPE_CHECKING:
    from rich.console import Console

    from sharpen.evidence.ended import Ended
    from sharpen.types import Group, Rollout


LISTED_GROUPS = 16
LISTED_ROLLOUTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which rollouts to list: those of a task, of a step, the failed ones, the ones of the highest reward (first)."""

    task: str | None = None
    step: int | None = None
    failed: bool = False
    best: bool = False
    limit: int | None = None

    @property
    def chooses(self) -> bool:
        """Whether rollouts are chosen one by one."""
        return self.task is not None or self.step is not None or self.failed or self.best

    def of(self, entries: Sequence[RolloutEntry]) -> list[RolloutEntry]:
        """Return the chosen rollouts: the last ones, or those of the highest reward."""
        chosen = [entry for entry in entries if self._takes(entry)]
        limit = self.limit or LISTED_ROLLOUTS
        if self.best:
            scored = [entry for entry in chosen if entry.reward is not None]
            return sorted(scored, key=lambda entry: entry.reward or 0.0, reverse=True)[:limit]
        return chosen[-limit:]

    def _takes(self, entry: RolloutEntry) -> bool:
        _, _, task = entry.group_id.partition("/")
        return (
            (self.task is None or task == self.task or task.endswith(f"/{self.task}"))
            and (self.step is None or step_of_group(entry.group_id) == self.step)
            and not (self.failed and entry.outcome == "ok")
        )


def first_of(journal: Path, evaluations: Path) -> Path:
    """Return the journal to list: that of the training, or, of a run that ended before its first rollout there, that of
    the check and the evaluation before it."""
    from sharpen.learning.experience.reading import find_rollouts

    if evaluations.exists() and not (journal.exists() and find_rollouts(journal, last=1)):
        return evaluations
    return journal


def print_ended(console: Console, ended: Ended) -> None:
    """Print what ended a run early."""
    what = "stopped" if ended.interrupted else "failed"
    for line in f"this run {what}: {ended.text}".splitlines():
        print_wrapped(console, line, style="yellow" if ended.interrupted else "red", hanging=2)
    console.print()


def choose(journal: Path, wanted: Filter) -> list[tuple[Group, Rollout]]:
    """Return the rollouts that the filter chooses, with their groups. Raises `ConfigError` if there is none; but that
    none has failed is an answer."""
    from sharpen.learning.experience.reading import find_rollouts, read_groups

    found = find_rollouts(journal) if journal.exists() else []
    entries, others = wanted.of(found), replace(wanted, failed=False, best=False)
    if not entries and wanted.failed and (not others.chooses or others.of(found)):
        return []
    if not entries:
        raise ConfigError(f"no rollout of {journal.parent} is {_words(wanted)}")
    ids = dict.fromkeys(entry.group_id for entry in entries)
    groups = {group.id: group for group in chain.from_iterable(read_groups(journal, group_id=id_) for id_ in ids)}
    rollouts = {one.id: (group, one) for group in groups.values() for one in group.with_baseline}
    return [rollouts[entry.id] for entry in entries if entry.id in rollouts]


def _words(wanted: Filter) -> str:
    words = [
        *([f"of task {wanted.task}"] if wanted.task is not None else []),
        *([f"of step {wanted.step}"] if wanted.step is not None else []),
        *(["failed"] if wanted.failed else []),
        *(["scored"] if wanted.best else []),
    ]
    return " and ".join(words)


def print_chosen(console: Console, run_dir: Path, chosen: Sequence[tuple[Group, Rollout]]) -> None:
    """Print a line for each rollout, with what it said last; that none has failed, if there is none."""
    if not chosen:
        print_wrapped(console, f"none of the rollouts that were asked for has failed: {run_dir}")
        return
    for _, rollout in chosen:
        reward = rollout.outcome.value if rollout.reward is None else f"reward {rollout.reward:g}"
        print_wrapped(console, f"{rollout.id}  {reward}  calls {len(rollout.calls)}", style="bold")
        if rollout.error:
            print_wrapped(console, f"    {rollout.error.splitlines()[0]}", style="red", hanging=4)
        if said := f"({TRIMMED})" if rollout.trimmed else last_answer(rollout):
            print_wrapped(console, f"    {said}", hanging=4)
    _say_how(console, run_dir, chosen[-1][1].id)


def print_groups(console: Console, journal: Path, run_dir: Path, limit: int | None) -> None:
    """Print the last groups with their rewards, and how the time was spent."""
    from sharpen.learning.experience.reading import read_steps
    from sharpen.show.monitor import spent

    groups = last_groups(journal, limit)
    width = max(map(len, groups), default=0)
    for group_id, entries in groups.items():
        rewards = " ".join(entry.outcome if entry.reward is None else f"{entry.reward:g}" for entry in entries)
        print_wrapped(console, f"{group_id:<{width}}  {rewards}", hanging=width + 2)
    if is_record(run_dir):
        console.print()
        for line in summary(run_dir):
            print_wrapped(console, line)
    if journal.exists() and (shares := spent.shares(record.metrics for record in read_steps(journal))):
        console.print()
        print_wrapped(console, f"time of all steps: {spent.line(shares)}")
    if not groups:
        console.print("no rollouts yet", markup=False)
    else:
        _say_how(console, run_dir, list(groups.values())[-1][0].id)


def last_groups(journal: Path, limit: int | None) -> Mapping[str, Sequence[RolloutEntry]]:
    """Return the rollouts of the last groups, by group."""
    from sharpen.learning.experience.reading import find_rollouts

    groups: dict[str, list[RolloutEntry]] = {}
    if not journal.exists():
        return groups
    for entry in find_rollouts(journal, last=limit or LISTED_GROUPS):
        groups.setdefault(entry.group_id, []).append(entry)
    return groups


def _say_how(console: Console, run_dir: Path, rollout_id: str) -> None:
    command = clean(f"sharpen show {run_dir} --rollout {rollout_id}")
    for line in ("", *command_lines("read one:  ", command, console.width)):
        console.print(line, markup=False, soft_wrap=True)


def rollout_json(group: Group, rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as JSON: its task's row, its result, and each call's messages and response."""
    return {
        "id": rollout.id,
        "task_id": rollout.task_id,
        "task": dict(group.task.row),
        "outcome": rollout.outcome.value,
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "error": rollout.error,
        "traceback": rollout.traceback,
        "trimmed": rollout.trimmed,
        "started": rollout.started,
        "seconds": rollout.seconds,
        "calls": list(map(_call_json, rollout.calls)),
    }


def _call_json(call: Any) -> dict[str, Any]:
    return {
        "messages": list(call.messages),
        "response": call.response,
        "finish_reason": call.finish_reason,
        "sampled_tokens": len(call.sampled_ids_S),
        "versions": sorted(set(call.versions_S.tolist())),
        "status": call.status.value,
        "agent": call.agent,
        "started": call.started,
        "seconds": call.seconds,
        "span": None if call.span is None else asdict(call.span),
    }


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
