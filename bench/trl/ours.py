"""One run of Sharpen on the quickstart, as `bench-trl` compares it: `examples/quickstart/agent.py` as it is.

Role: our side, in a process of its own. In: a seed and the number of steps. Out: `RUN/run.json` (`runs.Run`), the
models after a quarter of the steps and after the last in `RUN/steps/N`. The settings are those of
`examples/quickstart/main.py`, without its evaluations and the check before them: both sides' models are evaluated by
`evaluate.py`. Everything else that a run does is in the time: OpenAI clients, recording, journal, parity check,
certificate, checkpoints, metrics, display.

    .venv-trl/bin/python bench/trl/ours.py --out /tmp/ours-0 --seed 0 --steps 3
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `tune()` does, before torch is loaded

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import plain
import runs
import torch
from agent import judge, run_agent

from sharpen.config.load import ResolvedConfig, resolve
from sharpen.learning.trainer.checkpoint import step_directory
from sharpen.run.assembly import open_loop


def resolve_settings(arguments: argparse.Namespace) -> ResolvedConfig:
    """The recipe of the quickstart."""
    recipe = plain.Settings()
    return resolve(
        settings={
            "checkpoint_root_dir": str(arguments.out / "checkpoints"),
            "seed": arguments.seed,
            "train_dataset": {"path": str(plain.QUICKSTART / "data"), "total_steps": arguments.steps},
            "model": {"model_path": str(plain.QUICKSTART / "model"), "max_model_len": 512},
            "algorithm": {
                "algorithm_type": "grpo",
                "batch_size": recipe.num_tasks,
                "group_size": recipe.group_size,
                "learning_rate": recipe.lr,
                "save_interval_steps": runs.quarter(arguments.steps),
            },
            "loss": {"kl": "none"},
            "trainer": {
                "beta1": recipe.betas[0],
                "beta2": recipe.betas[1],
                "weight_decay": 0.0,
                "keep_checkpoints": arguments.steps,  # all: the one after a quarter of the steps is asked for below
            },
            "evaluation.hold_out": False,
            "check.enabled": False,
        }
    )


def main() -> int:
    """Train, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs.add_run_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(runs.NUM_THREADS)
    with open_loop(resolve_settings(arguments), run_agent, judge) as (loop, site):
        began = time.time()
        loop.run()
        metrics = (site.directory.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [
        runs.Step(reward=row["reward/mean"], end_s=row["time"] - began, trained_tokens=round(row["batch/loss_tokens"]))
        for row in map(json.loads, metrics)
        if "reward/mean" in row
    ]
    for step in (runs.quarter(arguments.steps), arguments.steps):
        model, target = step_directory(site.directory.path, step), arguments.out / "steps" / str(step)
        shutil.copytree(model, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("trainer_state"))
    runs.write_run(arguments.out, side="sharpen", seed=arguments.seed, steps=steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
