"""`sharpen show RUN_DIR --rollout ID`: print a rollout for reading in a terminal; with `--task ID` (`show_task`), what
the agent did with a held-out task before and after the training.

In: a run directory, the id of a rollout (or a unique end or beginning of it). Out: a `Page`; plain text if the output
is not a terminal. Without `--rollout`: the last groups with their rewards, and how the time was spent.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sharpen.cli.page import Page, open_console, print_wrapped
from sharpen.errors import ConfigError, ModelError
from sharpen.experience.records import EVALUATIONS
from sharpen.transcript import Decode

if TYPE_CHECKING:
    from rich.console import Console

    from sharpen.experience.reading import RolloutEntry, TrainedCall
    from sharpen.types import Rollout

LISTED_GROUPS = 16


def add_show(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run, which may still be running")
    parser.add_argument(
        "--rollout", metavar="ID", help="a rollout's id, or a unique end or beginning of it (default: list the last)"
    )
    parser.add_argument("--task", metavar="ID", help="show a held-out task before and after the training")
    parser.add_argument(
        "--mode", choices=("sampled", "greedy"), default="sampled", help="evaluation of the task (default: sampled)"
    )
    parser.add_argument("--call", type=int, metavar="N", help="only this call, with its whole prompt")
    parser.add_argument("--tokens", action="store_true", help="the sampled tokens as a table")


def run_show(arguments: argparse.Namespace, out: IO[str] | None = None) -> int:
    """Print a rollout, a task or the last groups. Raises `ConfigError` if there is no such run, rollout or call."""
    out = out or sys.stdout
    journal, evaluations = arguments.run_dir / "run.db", arguments.run_dir / EVALUATIONS
    if arguments.task is not None:
        from sharpen.cli.show_task import print_task

        console = open_console(out)
        page = Page(console, _decoder(console, arguments.run_dir), {}, "", untrained="an evaluation")
        print_task(evaluations, arguments.task, arguments.mode, page)
        return 0
    if not journal.exists():
        raise ConfigError(f"{arguments.run_dir} is not a run directory: it has no run.db")
    console = open_console(out)
    if arguments.rollout is None:
        if arguments.call is not None or arguments.tokens:
            raise ConfigError("--call and --tokens belong to --rollout, which was not given")
        _list(console, journal, arguments.run_dir)
        return 0
    try:
        rollout = read_rollout(journal, arguments.rollout)
    except ConfigError:
        if not evaluations.exists():
            raise
        rollout = read_rollout(evaluations, arguments.rollout)
    if arguments.call is not None and not 0 <= arguments.call < len(rollout.calls):
        raise ConfigError(f"--call {arguments.call}: rollout {rollout.id} has {len(rollout.calls)} calls, from 0")
    decode, number_name = _decoder(console, arguments.run_dir), _number_name(arguments.run_dir)
    page = Page(console, decode, _trained_calls(journal, rollout), number_name)
    page.rollout(rollout, only=arguments.call, tokens=arguments.tokens)
    return 0


def read_rollout(journal: Path, name: str) -> Rollout:
    """Read the rollout with this id, or the only one whose id ends or begins with it; if a step was repeated after an
    interruption, the later one. Raises `ConfigError` if there is none, or more than one."""
    from sharpen.experience.reading import find_rollouts, read_groups

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
            + (f"; ids that contain it: {similar}" if similar else " (sharpen show RUN_DIR lists the last ones)")
        )
    if len(names) > 1:
        raise ConfigError(f"{len(names)} rollouts match {name!r}, e.g. {', '.join(names[:3])}: give more of the id")
    *_, group = read_groups(journal, group_id=chosen[-1].group_id)
    return next(rollout for rollout in group.with_baseline if rollout.id == names[0])


def _list(console: Console, journal: Path, run_dir: Path) -> None:
    from sharpen.experience.reading import find_rollouts, read_steps
    from sharpen.monitor import spent

    groups: dict[str, list[RolloutEntry]] = {}
    for entry in find_rollouts(journal, last=LISTED_GROUPS):
        groups.setdefault(entry.group_id, []).append(entry)
    width = max(map(len, groups), default=0)
    for group_id, entries in groups.items():
        rewards = " ".join(entry.outcome if entry.reward is None else f"{entry.reward:g}" for entry in entries)
        print_wrapped(console, f"{group_id:<{width}}  {rewards}", hanging=width + 2)
    if shares := spent.shares(record.metrics for record in read_steps(journal)):
        console.print(f"\ntime of all steps: {spent.line(shares)}", markup=False)
    if not groups:
        console.print("no rollouts yet", markup=False)
    else:
        last = list(groups.values())[-1][0].id
        console.print(f"\nread one:  sharpen show {run_dir} --rollout {last}", markup=False, soft_wrap=True)


def _trained_calls(journal: Path, rollout: Rollout) -> dict[int, TrainedCall]:
    """Return the rollout's calls that carried loss, by index. Groups of step N are named `step-<N - 1>/...`."""
    from sharpen.experience.reading import read_trained

    number = re.match(r"step-(\d+)/", rollout.id)
    if number is None:
        return {}
    return {
        call.call: call
        for call in read_trained(journal, step=int(number.group(1)) + 1)
        if call.rollout_id == rollout.id
    }


def _number_name(run_dir: Path) -> str:
    """Name the number recorded with a trained call: its advantage, or the number from which a critic or a teacher makes
    those of its tokens."""
    from sharpen.algorithm.advantages import ADVANTAGES
    from sharpen.algorithm.presets import PRESETS

    path = run_dir / "resolved.json"
    resolved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    settings = {key: resolved.get(key, {}).get("value") for key in ("algorithm.algorithm_type", "loss.advantage")}
    preset = PRESETS.get(settings["algorithm.algorithm_type"])
    name = settings["loss.advantage"] or (preset.advantage if preset is not None else None)
    critic = name in ADVANTAGES and ADVANTAGES[name].of_tokens is not None
    if critic:
        return "reward for the critic"
    return "advantage without the teacher's" if preset is not None and preset.needs_teacher else "advantage"


def _decoder(console: Console, run_dir: Path) -> Decode | None:
    """Return a function from ids to text, with the tokenizer of the latest checkpoint, else of the model before
    training."""
    from sharpen.execution.model_files import model_folder
    from sharpen.trainer.checkpoint import pointed

    folder = pointed(run_dir, "latest")
    try:
        if folder is None:
            resolved = json.loads((run_dir / "resolved.json").read_text(encoding="utf-8"))
            folder = model_folder(resolved["model.model_path"]["value"])
    except (ModelError, OSError) as error:
        console.print(f"tokens are shown as ids: {error}", markup=False, highlight=False)
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
