"""`sharpen show RUN`: the last groups with their rewards, or the rollouts that `--failed`, `--best`, `--step` and
`--task` choose; with `--rollout ID` one rollout for reading; with `--task ID` what the agent did with a
held-out task before and after the training.

Of a run that ended before its first step it is the rollouts of the check and of the evaluation before, below what ended
it.

In: a run, the id of a rollout (or a unique end or beginning of it). Out: a `Page`; plain text if the output is not a
terminal; with `--json` the same rollouts as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sharpen.agent.transcript import TRIMMED, Decode, clean, last_answer, row_lines
from sharpen.cli.arguments import add_json, add_run, count, print_json, run_of
from sharpen.cli.page import Page, open_console, print_wrapped
from sharpen.errors import ConfigError, ModelError
from sharpen.evidence.ended import read_ended
from sharpen.learning.experience.reading import RolloutEntry, find_rollouts, read_groups
from sharpen.learning.experience.records import CHECK, EVALUATIONS
from sharpen.screen import command_lines
from sharpen.serve.record.folder import is_record, model_of_record, summary
from sharpen.types import step_of_group

if TYPE_CHECKING:
    from rich.console import Console

    from sharpen.evidence.ended import Ended
    from sharpen.learning.experience.entropies import TokenRatios
    from sharpen.learning.experience.reading import RolloutEntry, TrainedCall
    from sharpen.types import FloatArray, Group, Rollout


# `sharpen show RUN` without `--rollout`: the last groups with their rewards, or the rollouts that the filters choose.
#
# In: `run.db`, the filters. Out: a line for each group; or for each rollout with its last answer and its error, so that
# failures and the highest rewards can be read one below the other.

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


# `sharpen show RUN --task ID`: what the agent did with a held-out task before the training, and after it.
#
# In: `evaluations.db`, the id of a task (or a unique end of it), the mode. Out: a line for each evaluation of the task,
# then the first and the last of these rollouts.

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


def add_show(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument(
        "--rollout", metavar="ID", help="a rollout's id, or a unique end or beginning of it (default: list the last)"
    )
    parser.add_argument(
        "--task", metavar="ID", help="a held-out task before and after the training; else the rollouts of this task"
    )
    parser.add_argument("--failed", action="store_true", help="list the last rollouts that failed, with their errors")
    parser.add_argument("--best", action="store_true", help="list the rollouts of the highest reward, with answers")
    parser.add_argument("--step", type=count, metavar="N", help="list rollouts of this step")
    parser.add_argument("--limit", type=count, metavar="N", help="at most N groups or rollouts in a list")
    parser.add_argument(
        "--mode", choices=("sampled", "greedy"), default="sampled", help="evaluation of the task (default: sampled)"
    )
    parser.add_argument("--call", type=int, metavar="N", help="only this call, with its whole prompt")
    parser.add_argument("--tokens", action="store_true", help="the sampled tokens as a table")
    add_json(parser)


def run_show(arguments: argparse.Namespace, out: IO[str] | None = None) -> int:
    """Print a rollout, a task, the chosen rollouts or the last groups. Raises `ConfigError` if there is no such run,
    rollout or call."""
    out, run_dir = out or sys.stdout, run_of(arguments)
    wanted = Filter(
        task=arguments.task,
        step=arguments.step,
        failed=arguments.failed,
        best=arguments.best,
        limit=arguments.limit,
    )
    if arguments.rollout is not None:
        if wanted.chooses:
            raise ConfigError("--rollout names one rollout: --task, --step, --failed and --best choose among many")
        return _show_rollout(arguments, run_dir, out)
    if arguments.call is not None or arguments.tokens:
        raise ConfigError("--call and --tokens belong to --rollout, which was not given")
    journal, evaluations = run_dir / "run.db", run_dir / EVALUATIONS
    only_task = wanted == Filter(task=wanted.task, limit=wanted.limit) and wanted.task is not None
    if only_task and not (_has_no_such_task(arguments, evaluations) and journal.exists()):
        return _show_task(arguments, run_dir, out)
    ended = read_ended(run_dir)
    if not journal.exists() and not evaluations.exists() and ended is None:
        raise ConfigError(f"{run_dir} is not a run directory: it has no run.db")
    if ended is not None and not arguments.json:
        print_ended(open_console(out), ended)
    journal = first_of(journal, evaluations)
    if wanted.chooses:
        chosen = choose(journal, wanted)
        if arguments.json:
            print_json([rollout_json(group, rollout) for group, rollout in chosen], out)
        else:
            print_chosen(open_console(out), run_dir, chosen)
    elif arguments.json:
        groups = last_groups(journal, wanted.limit)
        print_json({id_: {one.id: one.reward for one in entries} for id_, entries in groups.items()}, out)
    else:
        print_groups(open_console(out), journal, run_dir, wanted.limit)
    return 0


def _show_rollout(arguments: argparse.Namespace, run_dir: Path, out: IO[str]) -> int:
    journal, evaluations = run_dir / "run.db", run_dir / EVALUATIONS
    if not journal.exists() and not evaluations.exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no run.db")
    try:
        group, rollout = read_rollout(journal if journal.exists() else evaluations, arguments.rollout)
    except ConfigError:
        if not evaluations.exists():
            raise
        group, rollout = read_rollout(evaluations, arguments.rollout)
    if arguments.call is not None and not 0 <= arguments.call < len(rollout.calls):
        raise ConfigError(f"--call {arguments.call}: rollout {rollout.id} has {len(rollout.calls)} calls, from 0")
    if arguments.json:
        print_json(rollout_json(group, rollout), out)
        return 0
    console = open_console(out)
    decode, number_name = _decoder(console, run_dir), _number_name(run_dir)
    untrained = "a recording" if is_record(run_dir) else "its rollout was not trained"
    entropies, ratios = _measured(journal, rollout)
    page = Page(
        console,
        decode,
        _trained_calls(journal, rollout),
        number_name,
        untrained=untrained,
        entropies=entropies,
        ratios=ratios,
    )
    page.rollout(rollout, only=arguments.call, tokens=arguments.tokens, row=tuple(row_lines(group.task.row)))
    return 0


def _has_no_such_task(arguments: argparse.Namespace, evaluations: Path) -> bool:
    try:
        evaluations_of(evaluations, arguments.task, arguments.mode)
    except ConfigError:
        return True
    return False


def _show_task(arguments: argparse.Namespace, run_dir: Path, out: IO[str]) -> int:
    entries = evaluations_of(run_dir / EVALUATIONS, arguments.task, arguments.mode)
    if arguments.json:
        print_json(task_json(run_dir / EVALUATIONS, entries), out)
        return 0
    console = open_console(out)
    page = Page(console, _decoder(console, run_dir), {}, "", untrained="an evaluation")
    print_task(run_dir / EVALUATIONS, entries, page)
    return 0


def read_rollout(journal: Path, name: str) -> tuple[Group, Rollout]:
    """Read the rollout with this id, or the only one whose id ends or begins with it, and its group; if a step was
    repeated after an interruption, the later one. Raises `ConfigError` if there is none, or more than one."""
    from sharpen.learning.experience.reading import find_rollouts, read_groups

    entries = find_rollouts(journal, part=name)
    chosen = (
        [entry for entry in entries if entry.id == name]
        or [entry for entry in entries if entry.id.endswith(f"/{name}")]
        or [entry for entry in entries if entry.id.startswith(name)]
    )
    names = sorted({entry.id for entry in chosen})
    if not names:
        similar = ", ".join(dict.fromkeys(entry.id for entry in entries[:3]))
        raise ConfigError(
            f"no rollout's id equals, ends or begins with {name!r}"
            + (f"; ids that contain it: {similar}" if similar else " (sharpen show RUN lists the last ones)")
        )
    if len(names) > 1:
        raise ConfigError(f"{len(names)} rollouts match {name!r}, e.g. {', '.join(names[:3])}: give more of the id")
    *_, group = read_groups(journal, group_id=chosen[-1].group_id)
    return group, next(rollout for rollout in group.with_baseline if rollout.id == names[0])


def _trained_calls(journal: Path, rollout: Rollout) -> dict[int, TrainedCall]:
    """Return the rollout's calls that carried loss in the step that it was drawn for, by index."""
    from sharpen.learning.experience.reading import read_trained

    step = step_of_group(rollout.id)
    if step is None or not journal.exists():
        return {}
    return {call.call: call for call in read_trained(journal, step=step) if call.rollout_id == rollout.id}


def _measured(journal: Path, rollout: Rollout) -> tuple[dict[int, FloatArray], dict[int, TokenRatios]]:
    """Return the entropies and the ratios of the rollout's trained tokens, by call; none for a run that did not record
    them."""
    from sharpen.learning.experience.entropies import read_entropies, read_ratios
    from sharpen.learning.experience.evidence import read_group_steps
    from sharpen.learning.experience.opening import reading

    if not journal.exists():
        return {}, {}
    with reading(journal) as connection:
        steps = [step for step, _ in read_group_steps(connection, rollout.group_id)]
        return read_entropies(connection, rollout, steps), read_ratios(connection, rollout, steps)


def _number_name(run_dir: Path) -> str:
    """Name the number recorded with a trained call: its advantage, or the number from which a critic or a teacher makes
    those of its tokens."""
    from sharpen.learning.algorithm.advantages import ADVANTAGES
    from sharpen.learning.algorithm.presets import PRESETS
    from sharpen.show.view.files import read_brief

    files = read_brief(run_dir)
    preset = PRESETS.get(str(files.setting("algorithm.algorithm_type")))
    name = files.setting("loss.advantage") or (preset.advantage if preset is not None else None)
    if not isinstance(name, str):
        return "advantage"
    critic = name in ADVANTAGES and ADVANTAGES[name].of_tokens is not None
    if critic:
        return "reward for the critic"
    return "advantage without the teacher's" if preset is not None and preset.needs_teacher else "advantage"


def _decoder(console: Console, run_dir: Path) -> Decode | None:
    """Return a function from ids to text, with the tokenizer of the latest checkpoint, else of the model before
    training; None if there is no tokenizer, as in a recording that names no model."""
    from sharpen.learning.trainer.checkpoint import pointed
    from sharpen.models.configuration import load_tokenizer
    from sharpen.models.files import model_folder
    from sharpen.show.view.files import read_brief

    folder = pointed(run_dir, "latest")
    try:
        if is_record(run_dir):
            if (model := model_of_record(run_dir)) is None:
                return None
            folder = model_folder(model)
        elif folder is None:
            folder = model_folder(str(read_brief(run_dir).setting("model.model_path") or ""))
        tokenizer = load_tokenizer(folder)
    except (ModelError, OSError) as error:
        console.print(f"tokens are shown as ids: {error}", markup=False, highlight=False)
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
