"""`sharpen rescore RUN --judge judge.py:judge`: another judge over the stored rollouts, and what it would have changed.

In: a run, a judge. Out: what would have changed in the training and in the evaluations; with `--output` the new reward
of each rollout. Nothing in the run is changed. The exit code is 1 if no rollout could be judged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sharpen.cli.arguments import add_json, add_run, answering, print_json, run_of, say
from sharpen.errors import ConfigError
from sharpen.files import check_writable, write_whole
from sharpen.learning.experience.records import CHECK, EVALUATIONS

if TYPE_CHECKING:
    from sharpen.evidence.rescore.changes import Changes
    from sharpen.evidence.rescore.scores import Score
    from sharpen.show.monitor.statistics import Difference


def add_rescore(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument(
        "--judge",
        required=True,
        metavar="MODULE:FUNCTION",
        help="the judge: package.module:function or file.py:function",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the rewards of each rollout as JSON lines")
    add_json(parser)


def run_rescore(arguments: argparse.Namespace) -> int:
    """Judge the rollouts. Raises `ConfigError` for a run or a judge that cannot be used."""
    from sharpen.config.functions import import_function
    from sharpen.evidence.rescore.changes import changes
    from sharpen.evidence.rescore.scores import check_judge, score
    from sharpen.learning.experience.reading import read_groups

    run_dir = run_of(arguments)
    journal, evaluations = run_dir / "run.db", run_dir / EVALUATIONS
    if not journal.exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no run.db")
    if arguments.output is not None:
        check_writable(arguments.output)
    with answering(arguments) as out:
        judge = import_function(arguments.judge)
        check_judge(judge)
        scores = score(read_groups(journal), judge)
        stored = read_groups(evaluations) if evaluations.exists() else ()
        evaluated = score((group for group in stored if not group.id.startswith(f"{CHECK}/")), judge)
        found, differences = changes(scores), held_out_differences(evaluated)
        if arguments.output is not None:
            _write(arguments.output, [*scores, *evaluated])
        if arguments.json:
            answer = {name: asdict(difference) for name, difference in differences.items()}
            trimmed = sum(score.trimmed for score in evaluated)
            print_json({"training": asdict(found), "evaluations": answer, "evaluations_trimmed": trimmed}, out)
        else:
            for line in [*lines(found), *difference_lines(differences), *trimmed_lines(evaluated)]:
                say(line)
    return 1 if scores and found.failed + found.trimmed == len(scores) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutDifference:
    """The evaluation at the moment `last` minus that at `first` (such as `before`, `step-20`, `after`), over the same
    tasks: by the recorded rewards and by the new ones."""

    first: str
    last: str
    recorded: Difference
    new: Difference


def held_out_differences(scores: Sequence[Score]) -> dict[str, HeldOutDifference]:
    """Return, by place, the difference between the first and the last evaluation that could be judged."""
    from sharpen.show.monitor.statistics import paired_difference

    places: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for score in scores:
        moment, _, rest = score.group.partition("/")
        if score.new is not None:
            place = rest.removesuffix(f"/{score.task}")
            places.setdefault(place, {}).setdefault(moment, {})[score.task] = (score.old, score.new)
    found = {}
    for place, moments in places.items():
        (first, early), (last, late) = next(iter(moments.items())), list(moments.items())[-1]
        if len(moments) > 1:
            sides = [({t: p[side] for t, p in early.items()}, {t: p[side] for t, p in late.items()}) for side in (0, 1)]
            old, new = (paired_difference(*pair, among={*pair[0].values(), *pair[1].values()}) for pair in sides)
            found[place] = HeldOutDifference(first=first, last=last, recorded=old, new=new)
    return found


def lines(found: Changes) -> Iterator[str]:
    """Yield what would have changed in the training."""
    if not found.rollouts:
        yield "no rollout of the training has a reward"
        return
    yield f"{found.rollouts} rollouts in {found.groups} groups: {found.same} keep their reward"
    if found.trimmed:
        yield f"{found.trimmed} cannot be judged: the run dropped their text (journal.keep_steps)"
    if found.failed:
        yield f"the judge failed on {found.failed}: {'; '.join(found.errors)}"
    if found.mean_before is not None and found.mean_after is not None:
        yield f"mean reward {found.mean_before:.3f} -> {found.mean_after:.3f}"
        yield f"groups without spread, which teach nothing: {found.flat_before} -> {found.flat_after}"
        yield f"rollouts that would have been pushed the other way: {found.turned}"
    for score in found.most:
        yield f"  {score.rollout}  {score.old:g} -> {score.new:g}"


def difference_lines(differences: Mapping[str, HeldOutDifference]) -> Iterator[str]:
    """Yield what the new judge says of the first and the last evaluation."""
    from sharpen.show.monitor.figures import signed

    for place, found in differences.items():
        yield (
            f"{place}, {found.last} - {found.first}: {signed(found.recorded)} as recorded, {signed(found.new)} by this "
            f"judge ({found.new.num_tasks} tasks)"
        )


def trimmed_lines(evaluated: Sequence[Score]) -> Iterator[str]:
    """Yield how many evaluated rollouts have no text left, and of which moments."""
    if trimmed := [score.group.partition("/")[0] for score in evaluated if score.trimmed]:
        moments = ", ".join(dict.fromkeys(trimmed))
        yield (
            f"{len(trimmed)} evaluated rollouts cannot be judged: the run dropped their text (journal.keep_steps): "
            f"{moments}"
        )


def _write(path: Path, scores: Sequence[Score]) -> None:
    write_whole(path, "".join(f"{json.dumps(asdict(score), ensure_ascii=False)}\n" for score in scores))
