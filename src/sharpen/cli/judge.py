"""`sharpen judge check FILE` and `sharpen judge label RUN`: a judge against its owner's marks, and the marks.

In: a file of marks and a judge; a run, whose answers its owner marks by keys, here or in a browser. Out: agreement and
error rates with intervals, with `--run` a run's success rates corrected by them; the file, a line for each mark, on
disk before the next answer is shown. The exit code is 1 if the judge failed on every answer, or is below the
configuration's `judge_floor`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sharpen.cli.arguments import (
    CONFIG,
    add_config_file,
    add_json,
    add_root,
    add_set,
    add_stage,
    answering,
    count,
    number,
    print_json,
    resolve_config,
    say,
)
from sharpen.cli.view import add_address, opening
from sharpen.errors import ConfigError

if TYPE_CHECKING:
    from sharpen.config.run import RunConfig
    from sharpen.evidence.judges.agreement import Agreement, Corrected
    from sharpen.evidence.judges.asking import Judged
    from sharpen.evidence.judges.marks import Answer

DONE, FAILED = 0, 1
MARKS = Path("marks.jsonl")
MOST = 60
"""Answers to mark, unless told otherwise."""
SHOWN = 10
"""Answers on which judge and owner disagree that are printed."""
KEYS = {"y": True, "n": False}


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("action", choices=("check", "label"), help="compare a judge with marks; or make the marks")
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="FILE|RUN",
        help=f"the marks to check against (default: {MARKS}); or the run to mark",
    )
    add_config_file(parser)
    add_set(parser, "judge_floor.kappa=0.5")
    add_stage(parser)
    parser.add_argument(
        "--judge", metavar="MODULE:FUNCTION", help="check this judge (default: that of the configuration)"
    )
    parser.add_argument("--times", type=count, default=1, metavar="N", help="ask N times for each answer: its scatter")
    parser.add_argument(
        "--good-from", type=number, metavar="X", help="the reward from which an answer is good (default: 0.5)"
    )
    parser.add_argument("--run", metavar="RUN", help="correct the success rates of this run's evaluations")
    parser.add_argument(
        "--marks", type=Path, default=MARKS, metavar="FILE", help=f"add the marks to this file (default: {MARKS})"
    )
    parser.add_argument(
        "--most", type=count, default=MOST, metavar="N", help=f"show at most N answers to mark (default: {MOST})"
    )
    parser.add_argument("--browser", action="store_true", help="mark in a browser, not here")
    add_address(parser)
    add_root(parser)
    add_json(parser)


def run_judge(arguments: argparse.Namespace, keys: IO[str] | None = None) -> int:
    """Check a judge, or mark answers by `keys`. Raises `ConfigError` or `DatasetError` for what cannot be used."""
    return _label(arguments, keys or sys.stdin) if arguments.action == "label" else _check(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from sharpen.agent.judges.several import GOOD_FROM
    from sharpen.evidence.judges.agreement import agreement_of, below
    from sharpen.evidence.judges.marks import read_marks

    marks = read_marks(Path(arguments.subject or MARKS))
    with answering(arguments) as out:
        config, judge = _judge_of(arguments)
        floor = None if config is None else config.judge_floor
        given = arguments.good_from if arguments.good_from is not None else None if floor is None else floor.good_from
        good_from = GOOD_FROM if given is None else given
        judged = _ask(config, judge, marks, arguments.times)
        found = agreement_of(judged, good_from=good_from)
        corrected = _corrected(arguments, found, good_from)
        apart = [one for one in judged if one.rewards and (one.rewards[0] >= good_from) != one.mark.good]
        if arguments.json:
            print_json(_as_json(found, corrected, apart), out)
        else:
            for line in _lines(found, corrected, apart):
                say(line)
    problem = None if floor is None else below(found, floor.kappa)
    if problem is not None:
        say(f"sharpen: below the floor of judge_floor: the judge {problem}", file=sys.stderr)
    return FAILED if problem is not None or not found.judged else DONE


def _judge_of(arguments: argparse.Namespace) -> tuple[RunConfig | None, Callable[..., Any]]:
    """Return the configuration, if there is one, and the judge. Raises `ConfigError` without a judge."""
    from sharpen.config.functions import import_function

    if arguments.config is None and arguments.judge is None:
        if not CONFIG.is_file():
            raise ConfigError(
                f"give the judge (--judge judge.py:judge), or --config: there is no {CONFIG} in {Path.cwd()}"
            )
        arguments.config = CONFIG
        say(f"sharpen: --config {CONFIG}, of this folder", file=sys.stderr)
    config = None if arguments.config is None else resolve_config(arguments, {}).config
    name = arguments.judge or (None if config is None else config.judge)
    if name is None:
        raise ConfigError(f"{arguments.config} names no judge: the workflow gives the rewards itself; give --judge")
    return config, import_function(name)


def _ask(config: RunConfig | None, judge: Callable[..., Any], marks: Sequence[Any], times: int) -> list[Judged]:
    if config is None:
        from sharpen.evidence.judges.asking import ask_judge

        return ask_judge(judge, marks, times=times)
    from sharpen.config.functions import variables
    from sharpen.run.judging import ask_with_models

    with variables(config.rollout.env_vars):
        return ask_with_models(config, judge, marks, times=times)


def _corrected(arguments: argparse.Namespace, found: Agreement, good_from: float) -> dict[str, Corrected]:
    """Return the success rates of a run's evaluations, by place and moment, corrected for the judge's errors."""
    from sharpen.evidence.judges.agreement import corrected_rate
    from sharpen.learning.experience.reading import read_groups
    from sharpen.learning.experience.records import CHECK, EVALUATIONS
    from sharpen.run.found import find_run

    if arguments.run is None:
        return {}
    path = find_run(arguments.run, arguments.root) / EVALUATIONS
    if not path.exists():
        raise ConfigError(f"{path.parent} has no evaluations: there is no success rate to correct")
    called: dict[str, list[bool]] = {}
    for group in read_groups(path):
        moment, _, rest = group.id.partition("/")
        rewards = [one.reward for one in group.rollouts if one.reward is not None]
        if moment != CHECK:
            place = f"{rest.removesuffix(f'/{group.task.id}')}, {moment}"
            called.setdefault(place, []).extend(reward >= good_from for reward in rewards)
    return {place: corrected_rate(answers, found) for place, answers in called.items() if answers}


def _lines(found: Agreement, corrected: Mapping[str, Corrected], apart: Sequence[Judged]) -> Iterator[str]:
    yield from found.lines()
    yield from (f"{place}: {one}" for place, one in corrected.items())
    if apart:
        yield f"they disagree on {len(apart)}:"
    for one in apart[:SHOWN]:
        said = " ".join(one.mark.answer.text.split())[:120]
        yield f"  {'good' if one.mark.good else 'not good'}, reward {one.rewards[0]:g}: {said}"


def _as_json(found: Agreement, corrected: Mapping[str, Corrected], apart: Sequence[Judged]) -> dict[str, Any]:
    wrong = [
        {
            "rollout": one.mark.answer.rollout,
            "answer": one.mark.answer.text,
            "mark": one.mark.good,
            "reward": one.rewards[0],
        }
        for one in apart
    ]
    rates = {place: asdict(one) for place, one in corrected.items()}
    return {**found.to_json(), "corrected": rates, "disagreements": wrong}


def _label(arguments: argparse.Namespace, keys: IO[str]) -> int:
    """Show answers of a run, one after the other, and keep what their owner says of each."""
    from sharpen.config.functions import reading_runs
    from sharpen.evidence.judges.marks import answers_to_mark, read_marks
    from sharpen.run.found import find_run

    run_dir = find_run(arguments.subject, arguments.root)
    before = read_marks(arguments.marks) if arguments.marks.exists() else []
    with answering(arguments) as out:
        with reading_runs():
            answers = answers_to_mark(run_dir, before, arguments.most)
        say(f"{len(answers)} answers of {run_dir}; rewards are not shown. {len(before)} marks in {arguments.marks}")
        if arguments.browser and answers:
            from sharpen.show.view.labelling import label

            marked = label(answers, arguments.marks, port=arguments.port, opened=opening("answers", arguments))
        else:
            marked = _by_keys(arguments.marks, answers, keys)
        say(f"{len(before) + marked} marks in {arguments.marks}; next: sharpen judge check {arguments.marks}")
        if arguments.json:
            print_json({"marks": str(arguments.marks), "added": marked, "before": len(before)}, out)
    return DONE


def _by_keys(path: Path, answers: Sequence[Answer], keys: IO[str]) -> int:
    """Show answers here, and return how many were marked."""
    from sharpen.evidence.judges.marks import Mark, add_mark

    marked = 0
    for place, answer in enumerate(answers, 1):
        for line in _answer_lines(answer, place, len(answers)):
            say(line)
        key = _key(keys)
        if key == "q":
            break
        if key in KEYS:
            add_mark(path, Mark(answer=answer, good=KEYS[key]))
            marked += 1
    return marked


def _answer_lines(answer: Answer, place: int, total: int) -> Iterator[str]:
    from sharpen.agent.transcript import row_lines

    yield from ("", f"--- {place} of {total}", *row_lines(answer.task), "answer:")
    yield from (f"    {line}" for line in answer.text.splitlines())
    yield "good? y yes, n no, s skip, q quit"


def _key(keys: IO[str]) -> str:
    """Return the next key that means something: at a terminal without Enter, else the first letter of a line. The end
    of the input is `q`."""
    while True:
        found = _pressed(keys)
        if found in (*KEYS, "s", "q"):
            return found
        say(f"{found!r} means nothing here: y, n, s or q", file=sys.stderr)


def _pressed(keys: IO[str]) -> str:
    try:
        import termios
        import tty
    except ImportError:  # Windows
        terminal = False
    else:
        terminal = keys.isatty()
    if not terminal:
        line = keys.readline()
        return line.strip()[:1].lower() if line else "q"
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys, termios.TCSADRAIN)  # keeps what was typed ahead; Ctrl-C interrupts as ever
        return os.read(keys.fileno(), 1).decode(errors="replace").lower() or "q"
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
