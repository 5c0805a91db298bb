"""`make bench-step`: one step of the quickstart, against a plain loop of transformers `generate` and padded training.

Both sides, in the same process and the same matmul setting: 16 tasks x 8 rollouts of the quickstart's agent (two
calls, tool schema in the prompt), its shipped model, fp32, one update. The sides take turns; medians are compared.
Ours is the whole product: OpenAI clients, recording, journal on disk, parity check, weights into the engine.

Target: `step` >= 2.7 (plain seconds over ours).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import plain
import report
import torch
from agent import judge, run_agent

from agenttune.config.load import resolve
from agenttune.tuning import open_loop

TARGET = 2.7


def main() -> int:
    """Measure, print, write `bench/out/step.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    settings = plain.Settings()
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
            ours: list[tuple[float, float, float]] = []
            theirs: list[tuple[float, float, float]] = []
            for repeat in range(arguments.repeats + 1):  # the first of each warms up
                began = time.perf_counter()
                step = loop.step()
                mine = (time.perf_counter() - began, step.rollout_s, step.train_s + step.sync_s)
                began = time.perf_counter()
                done = plain.run_step(model, tokenizer, optimizer, draw.sample(tasks, settings.num_tasks), settings)
                other = (time.perf_counter() - began, done.rollout_s, done.train_s)
                if repeat:
                    ours.append(mine)
                    theirs.append(other)
                print(f"  ours {mine[0]:.2f} s, plain {other[0]:.2f} s", flush=True)
    mine, other = (tuple(statistics.median(column) for column in zip(*side, strict=True)) for side in (ours, theirs))
    names = ("step", "rollouts", "training")
    ratios = {name: b / a for name, a, b in zip(names, mine, other, strict=True)}
    rows = [(name, b, a, b / a) for name, a, b in zip(names, mine, other, strict=True)]
    return report.finish(
        "step",
        header=("16 x 8 rollouts", "plain s", "agenttune s", "ratio"),
        rows=rows,
        ratios=ratios,
        at_least={"step": TARGET},
        extra={"repeats": arguments.repeats, "matmul": torch.get_float32_matmul_precision()},
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
