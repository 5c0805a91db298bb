"""`make bench-trl`: the quickstart tuned by Hugging Face TRL's `GRPOTrainer` and by Sharpen, the same work for both.

Both sides: the quickstart's model, tasks, tool and judge; 40 steps of 16 tasks x 8 rollouts; learning rate 3e-4, betas
0.9 and 0.95, no weight decay, no KL, gradients clipped to norm 1, fp32, temperature 1, token-mean over the batch; three
seeds; two threads on two cores. The sides take turns, each run in a process of its own (`peer.py`, `ours.py`).
TRL's settings that decide its speed on a CPU are tried first, a few steps each, and its fastest ones are used; what TRL
allows and we tried is `KNOBS`. A third process judges the models (`evaluate.py`).

At equal time: TRL's model after the step it was in when our run of that seed had made a quarter of its steps, and all
of them (a step in TRL's favour). At the quarter there is still something to learn; at the end both have learnt it.
The table's last column is TRL's figure over ours, or ours less TRL's in points of accuracy with a 95% interval over the
seeds; beside a mean are the lowest and the highest seed.

Targets: `step` >= 3 (TRL's median seconds of a step over ours); at equal steps at least as good within the interval
(`..._equal_steps_high` >= 0, the upper end of ours - TRL's); at equal time better (`sampled_quarter_low` >= 0; greedy
accuracy is near its end after three steps of either side, and only reported).

    .venv-trl/bin/python bench/trl/compare.py                        # all of it, about 35 minutes on two quiet cores
    .venv-trl/bin/python bench/trl/compare.py --resume               # goes on where a run was cut off
    .venv-trl/bin/python bench/trl/compare.py --steps 3 --seeds 1    # to see it work
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import picture
import plain
import report
import runs
from runs import Held, Interval, Mode, Run

HERE = Path(__file__).parent
SIDES = {"trl": "peer.py", "sharpen": "ours.py"}
MODES: tuple[Mode, ...] = ("greedy", "sampled")
TARGET = 3.0
JUDGED = ("greedy_equal_steps_high", "sampled_equal_steps_high", "sampled_quarter_low")
TRIAL_STEPS, TRIAL_LIMIT_S = 4, 300.0
# Tried in this order, each kept where it is faster: arguments of peer.py, or a variable of its environment.
KNOBS = (
    "--precision medium",
    "--micro-batch 32",
    "--micro-batch 64",
    "--cache static",
    "--continuous-batching",
    "--workers 1",
    "OMP_WAIT_POLICY=passive",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The same time on both sides: when our run had made `our_steps`, and TRL's was in its step `trl_steps`."""

    our_steps: int
    trl_steps: int
    ours: Held
    trl: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One seed on both sides: the runs, TRL's last model, and both at a quarter and at the end of our run."""

    trl: Run
    ours: Run
    trl_held: Held
    quarter: Moment
    end: Moment


def in_process(
    script: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None, limit_s: float | None = None
) -> None:
    """Run one of the scripts with two threads; its output is passed on. Raises where it fails or takes too long."""
    threads = str(runs.NUM_THREADS)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", **(variables or {})}
    subprocess.run([sys.executable, str(HERE / script), *arguments], env=environment, check=True, timeout=limit_s)


def touch_memory(gigabytes: float = 4.0) -> None:
    """Have the machine map memory before a run needs it: where it is virtual, the first touch can take seconds a GB."""
    code = f"import numpy; numpy.empty(int({gigabytes} * 2**30), numpy.uint8)[::4096] = 1"
    subprocess.run([sys.executable, "-c", code], check=True)


def train(
    side: str, out: Path, *, seed: int, steps: int, knobs: Sequence[str] = (), limit_s: float | None = None
) -> Run:
    """One run of one side, unless it is there."""
    if not (out / "run.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        touch_memory()
        variables = dict(knob.split("=") for knob in knobs if "=" in knob)
        options = [part for knob in knobs if "=" not in knob for part in knob.split()]
        options += ["--out", str(out), "--seed", str(seed), "--steps", str(steps)]
        in_process(SIDES[side], options, variables, limit_s)
    return runs.read_run(out)


def evaluate(model: Path, out: Path, arguments: argparse.Namespace) -> Held:
    """Rewards of one model on the held-out tasks, unless they are there."""
    if not out.exists():
        limit = [] if arguments.tasks is None else ["--tasks", str(arguments.tasks)]
        in_process("evaluate.py", [str(model), "--out", str(out), "--samples", str(arguments.samples), *limit])
    return runs.read_held(out)


def choose_knobs(folder: Path) -> list[str]:
    """TRL's fastest settings here: one after the other is added, and stays if the median step was faster with it."""
    path = folder / "knobs.json"
    if path.exists():
        found: list[str] = json.loads(path.read_text(encoding="utf-8"))["chosen"]
        return found
    chosen: list[str] = []
    best = math.inf
    tried: dict[str, float | None] = {}
    for knob in ("", *KNOBS):
        trial = [*(other for other in chosen if other.split()[0] != knob.split()[0]), knob] if knob else []
        name = " ".join(trial) or "as it is"
        place = folder / f"trial-{name.replace(' ', '_')}"
        try:
            run = train("trl", place, seed=0, steps=TRIAL_STEPS, knobs=trial, limit_s=TRIAL_LIMIT_S if knob else None)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            if not knob:
                raise
            tried[name] = None
            print(f"TRL, {name}: {type(error).__name__}", flush=True)
            continue
        tried[name] = seconds = statistics.median(run.step_s[1:])
        print(f"TRL, {name}: {seconds:.2f} s a step", flush=True)
        if seconds < best:
            chosen, best = trial, seconds
    runs.write_json(path, {"chosen": chosen, "tried": tried})
    return chosen


def measure(seed: int, folder: Path, knobs: Sequence[str], arguments: argparse.Namespace) -> Pair:
    """Both sides with one seed, in turns: even seeds let TRL begin."""
    places = {side: folder / f"{side}-{seed}" for side in SIDES}
    trained = {}
    for side in sorted(SIDES, reverse=seed % 2 == 0):
        print(f"\n{side}, seed {seed}", flush=True)
        options = knobs if side == "trl" else ()
        trained[side] = train(side, places[side], seed=seed, steps=arguments.steps, knobs=options)

    def held(side: str, steps: int) -> Held:
        return evaluate(places[side] / "steps" / str(steps), places[side] / f"held_out_{steps}.json", arguments)

    def moment(steps: int) -> Moment:
        then = trained["trl"].steps_at(trained["sharpen"].steps[steps - 1].end_s)
        return Moment(our_steps=steps, trl_steps=then, ours=held("sharpen", steps), trl=held("trl", then))

    return Pair(
        trl=trained["trl"],
        ours=trained["sharpen"],
        trl_held=held("trl", arguments.steps),
        quarter=moment(runs.quarter(arguments.steps)),
        end=moment(arguments.steps),
    )


def compare(ours: Sequence[Held], theirs: Sequence[Held], mode: Mode) -> Interval:
    """Ours less TRL's held-out accuracy, one model for each seed."""
    return runs.difference([held.accuracy(mode) for held in ours], [held.accuracy(mode) for held in theirs])


def summary(pair: Pair) -> dict[str, Any]:
    """One seed for the JSON file: runs as they were, accuracies."""
    held = {"trl": pair.trl_held}
    for name in ("quarter", "end"):
        moment: Moment = getattr(pair, name)
        held |= {f"trl_at_{name}": moment.trl, f"sharpen_at_{name}": moment.ours}
    return {
        "runs": [asdict(pair.trl), asdict(pair.ours)],
        "trl_steps": {"quarter": pair.quarter.trl_steps, "end": pair.end.trl_steps},
        "accuracy": {name: {mode: each.accuracy(mode) for mode in MODES} for name, each in held.items()},
    }


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Mean, and lowest to highest where there is more than one."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def percent(models: Sequence[Held], mode: Mode) -> str:
    """Accuracy of one side's models."""
    return spread([100 * held.accuracy(mode) for held in models], 1)


def make_rows(pairs: Sequence[Pair], before: Held) -> tuple[list[tuple[str, str, str, str]], dict[str, float]]:
    """The table (mean over the seeds, lowest to highest), and the ratios."""
    theirs, ours = [pair.trl for pair in pairs], [pair.ours for pair in pairs]
    medians = [statistics.median([s for run in side for s in run.step_s]) for side in (theirs, ours)]
    ratios = {"step": medians[0] / medians[1]}
    rows = [("median step, s", f"{medians[0]:.2f}", f"{medians[1]:.2f}", f"{ratios['step']:.2f} x")]
    for label, name, unit in (
        ("all steps, s", "train_s", 1),
        ("whole process, s", "process_s", 1),
        ("peak memory, MB", "peak_memory_mb", 1),
        ("tokens in loss, k", "trained_tokens", 1000),
    ):
        left, right = ([getattr(run, name) / unit for run in side] for side in (theirs, ours))
        ratios[name.removesuffix("_s").removesuffix("_mb")] = ratio = statistics.fmean(left) / statistics.fmean(right)
        rows.append((label, spread(left), spread(right), f"{ratio:.2f} x"))
    quarters, ends = [pair.quarter for pair in pairs], [pair.end for pair in pairs]
    for mode in MODES:
        rows.append((f"{mode} %, before", percent([before], mode), percent([before], mode), ""))
        for label, name, left, right in (
            (f"at {len(ours[0].steps)} steps each", "equal_steps", [pair.trl_held for pair in pairs], ends),
            (f"time of our {quarters[0].our_steps} steps", "quarter", [one.trl for one in quarters], quarters),
            (f"time of our {ends[0].our_steps} steps", "end", [one.trl for one in ends], ends),
        ):
            mine = [moment.ours for moment in right]
            found = compare(mine, left, mode)
            rows.append((f"{mode} %, {label}", percent(left, mode), percent(mine, mode), str(found)))
            if len(pairs) > 1:
                ratios |= {f"{mode}_{name}_low": found.low, f"{mode}_{name}_high": found.high}
    for moments in (quarters, ends):
        steps = [moment.trl_steps for moment in moments]
        rows.append((f"steps in time of our {moments[0].our_steps}", spread(steps), str(moments[0].our_steps), ""))
    return rows, ratios


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as the documentation shows it."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def main() -> int:
    """Measure, print, draw, write `bench/out/trl.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... on each side")
    parser.add_argument("--samples", type=int, default=4, help="sampled rollouts of each held-out task")
    parser.add_argument("--tasks", type=int, default=None, help="only the first so many held-out tasks")
    parser.add_argument("--no-trials", action="store_true", help="take TRL's settings as they are")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier call of the same kind has measured")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown too")
    parser.add_argument("--picture", type=Path, default=report.OUT / "trl.png")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: runs.NUM_THREADS])
    folder = report.OUT / f"trl-{arguments.steps}"
    if not arguments.resume:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    knobs = [] if arguments.no_trials else choose_knobs(folder)
    print(f"TRL's settings: {' '.join(knobs) or 'as they are'}", flush=True)
    before = evaluate(plain.QUICKSTART / "model", folder / "held_out_before.json", arguments)
    pairs = [measure(seed, folder, knobs, arguments) for seed in range(arguments.seeds)]
    rows, ratios = make_rows(pairs, before)
    header = (f"seeds: {arguments.seeds}", f"TRL {version('trl')}", "Sharpen", "ratio, points (95%)")
    picture.draw([pair.trl for pair in pairs], [pair.ours for pair in pairs], arguments.picture)
    if arguments.markdown:
        print(f"\n{markdown(header, rows)}")
    return report.finish(
        "trl",
        header=header,
        rows=rows,
        ratios=ratios,
        at_least={"step": TARGET}
        | {name: 0.0 for name in ratios if name.endswith(("_equal_steps_high", "_quarter_low"))},
        extra={
            "knobs": knobs,
            "accuracy_before": {mode: before.accuracy(mode) for mode in MODES},
            "pairs": [summary(pair) for pair in pairs],
        },
    )


if __name__ == "__main__":
    sys.exit(main())
