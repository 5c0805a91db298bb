"""`sharpen show RUN`: the last groups with their rewards, or the rollouts that `--failed`, `--best`, `--step` and
`--task` choose (`show_list`); with `--rollout ID` one rollout for reading; with `--task ID` what the agent did with a
held-out task before and after the training (`show_list`).

Of a run that ended before its first step it is the rollouts of the check and of the evaluation before, below what ended
it.

In: a run, the id of a rollout (or a unique end or beginning of it). Out: a `Page`; plain text if the output is not a
terminal; with `--json` the same rollouts as JSON.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sharpen.agent.transcript import Decode, row_lines
from sharpen.cli.arguments import add_json, add_run, count, print_json, run_of
from sharpen.cli.page import Page, open_console
from sharpen.cli.show_list import (
    Filter,
    choose,
    first_of,
    last_groups,
    print_chosen,
    print_ended,
    print_groups,
    rollout_json,
)
from sharpen.errors import ConfigError, ModelError
from sharpen.evidence.ended import read_ended
from sharpen.learning.experience.records import EVALUATIONS
from sharpen.serve.record.folder import is_record, model_of_record
from sharpen.types import step_of_group

if TYPE_CHECKING:
    from rich.console import Console

    from sharpen.learning.experience.entropies import TokenRatios
    from sharpen.learning.experience.reading import TrainedCall
    from sharpen.types import FloatArray, Group, Rollout


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
    from sharpen.cli.show_list import evaluations_of

    try:
        evaluations_of(evaluations, arguments.task, arguments.mode)
    except ConfigError:
        return True
    return False


def _show_task(arguments: argparse.Namespace, run_dir: Path, out: IO[str]) -> int:
    from sharpen.cli.show_list import evaluations_of, print_task, task_json

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
