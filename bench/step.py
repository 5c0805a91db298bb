"""`make bench-step`: one step of the quickstart, against a plain loop of transformers `generate` and padded training.

Both sides in the same process: 16 tasks x 8 rollouts of the quickstart's agent (two calls, tool schema in the prompt),
its shipped model, fp32, one update. Ours is the whole product: OpenAI clients, recording, journal on disk, parity
check, weights into the engine. The sides take turns, and the plain side has a turn with each of PyTorch's two settings
for fp32 products (our engine probes which is faster here): its faster one counts. Medians are compared.

Then what it costs to make a step once more beside the run (`certificate.retrain`): steps while the process works, in
turns with steps without it, and how long the process takes. `beside` is a step alone over a step beside the process: on
two threads of one core they share what the core can do, whatever their priorities. A long run lets the process work
`SHARE` of its time; `a long run` is its speed as a part of that of a run without: 1 - SHARE x (1 - beside).

Targets: `step` >= 2.7 (plain seconds over ours); `a long run` >= 0.97.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `tune()` does, before torch is loaded; for both sides

import plain
import report
import torch
from agent import judge, run_agent

from sharpen.config.load import resolve
from sharpen.evidence.certificate.plain.beside import RepeatedBeside
from sharpen.run.assembly import open_loop
from sharpen.run.loop import Loop
from sharpen.run.repeats import SHARE

TARGET, LONG_RUN = 2.7, 0.97


Seconds = tuple[float, float, float]
"""A whole step, its rollouts, its training (weights into the engine included)."""


def _ours(loop: Loop) -> Seconds:
    began = time.perf_counter()
    spent = loop.step().metrics
    return time.perf_counter() - began, spent["time/rollout_s"], spent["time/train_s"] + spent["time/sync_s"]


def _plain(done: plain.StepReport) -> Seconds:
    return done.rollout_s + done.train_s, done.rollout_s, done.train_s


def _cost_of_repeating(loop: Loop, folder: Path, repeats: int) -> tuple[float, float, float]:
    """Return the seconds of a step alone, of one beside the process that makes one once more, and of the process."""
    alone: list[float] = []
    beside: list[float] = []
    took: list[float] = []
    while len(beside) < repeats:
        before, after = (folder / f"{name}_{len(took)}" for name in ("before", "after"))
        loop.trainer.save(before, {})
        loop.run_step()
        loop.trainer.save(after, {})
        loop.journal.flush()
        job = RepeatedBeside(loop.run_dir, loop.progress.step, before, after)
        seconds = _ours(loop)[0]
        while not job.ended:  # the step that it ends in does not count
            beside.append(seconds)
            seconds = _ours(loop)[0]
        found = job.result()
        assert found.repeated, found
        assert not found.problems, found.problems
        took.append(job.seconds)
        alone += [_ours(loop)[0] for _ in range(repeats)]
    return statistics.median(alone), statistics.median(beside), statistics.median(took)


def main() -> int:
    """Measure, print, write `bench/out/step.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=plain.Settings().num_tasks, help="of a step; 8 rollouts each")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    settings = plain.Settings(num_tasks=arguments.tasks)
    with tempfile.TemporaryDirectory() as folder:
        resolved = resolve(
            settings={
                "checkpoint_root_dir": folder,
                "train_dataset.path": str(plain.QUICKSTART / "data"),
                "model": {"model_path": str(plain.QUICKSTART / "model"), "max_model_len": 512},
                "algorithm": {
                    "algorithm_type": "grpo",
                    "batch_size": settings.num_tasks,
                    "group_size": settings.group_size,
                    "learning_rate": settings.lr,
                },
                "loss.kl": "none",
                "evaluation.hold_out": False,
                "check.enabled": False,
            }
        )
        with open_loop(resolved, run_agent, judge) as (loop, _):
            model, tokenizer = plain.load(plain.QUICKSTART / "model")
            optimizer = plain.make_optimizer(model, settings)
            tasks = plain.load_tasks("train")
            draw = random.Random(0)
            sides: dict[str, list[Seconds]] = {"sharpen": [], "plain highest": [], "plain medium": []}
            for repeat in range(arguments.repeats + 1):  # the first of each warms up
                turn = {"sharpen": _ours(loop)}
                for precision in ("highest", "medium"):
                    torch.set_float32_matmul_precision(precision)
                    batch = draw.sample(tasks, settings.num_tasks)
                    turn[f"plain {precision}"] = _plain(plain.run_step(model, tokenizer, optimizer, batch, settings))
                torch.set_float32_matmul_precision("highest")
                print("  " + ", ".join(f"{side} {seconds[0]:.2f} s" for side, seconds in turn.items()), flush=True)
                if repeat:
                    for side, seconds in turn.items():
                        sides[side].append(seconds)
            alone, beside, process = _cost_of_repeating(loop, Path(folder), arguments.repeats)
    medians = {
        side: tuple(statistics.median(column) for column in zip(*seconds, strict=True))
        for side, seconds in sides.items()
    }
    mine = medians.pop("sharpen")
    best = min(medians, key=lambda side: medians[side][0])
    other = medians[best]
    names = ("step", "rollouts", "training")
    ratios = {name: b / a for name, a, b in zip(names, mine, other, strict=True)}
    rows = [(name, b, a, b / a) for name, a, b in zip(names, mine, other, strict=True)]
    ratios["beside"] = alone / beside
    ratios["a long run"] = 1 - SHARE * (1 - alone / beside)
    rows.append(("a step alone, and beside one that is made once more", alone, beside, alone / beside))
    rows.append((f"the process that does it: {process / alone:.0f} steps long", None, process, None))
    return report.finish(
        "step",
        header=(f"{arguments.tasks} x 8 rollouts", f"{best} s", "sharpen s", "ratio"),
        rows=rows,
        ratios=ratios,
        at_least={"step": TARGET, "a long run": LONG_RUN},
        extra={"repeats": arguments.repeats, "medians": {"sharpen": mine, **medians}},
    )


if __name__ == "__main__":
    sys.exit(main())
