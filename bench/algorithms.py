"""Algorithms beside each other on the quickstart, at equal steps: DPPO and GRPO with several updates in each step; the
whole distribution and `top_p: 0.9`, by GRPO and by RAFT, which needs no ratio.

In: seeds, steps. Out: held-out accuracy before and after, mean over the seeds, and the differences between two of them
with Welch's interval over the seeds; the largest gap between an engine's logprobs and the trainer's. Each run has the
quickstart's model, agent, tasks and settings but for what its name says.

    python bench/algorithms.py --seeds 0,1,2 --steps 20
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `tune()` does, before torch is loaded
sys.path.insert(0, str(Path(__file__).parent / "trl"))  # the interval of a difference

from plain import QUICKSTART
from report import finish
from runs import difference

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune

SPLIT = {"trainer.num_minibatches": 4}
CUT = {"model.top_p": 0.9}
RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo, 4 minibatches": ("grpo", SPLIT),
    "dppo, 4 minibatches": ("dppo", SPLIT),
    "grpo, top_p 0.9": ("grpo", CUT),
    "raft, top_p 0.9": ("raft", CUT),
}
"""By name: the algorithm, and what is set beside the quickstart's settings."""
DIFFERENCES = (
    ("dppo, 4 minibatches", "grpo, 4 minibatches"),
    ("grpo, top_p 0.9", "grpo"),
    ("grpo, top_p 0.9", "raft, top_p 0.9"),
)


@dataclass(frozen=True)
class Outcome:
    """What came out of one run: held-out accuracies, before and after; the largest gap of a step, in nats."""

    greedy: tuple[float, float]
    sampled: tuple[float, float]
    gap: float
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--held-out", type=int, default=512, help="tasks that a model is measured on (default: 512)")
    parser.add_argument("--runs", default=";".join(RUNS), help="names, between semicolons (default: all)")
    arguments = parser.parse_args(argv)
    seeds, names = [int(seed) for seed in arguments.seeds.split(",")], arguments.runs.split(";")
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    with TemporaryDirectory() as folder:
        for seed in seeds:  # side by side, so that what the machine does beside them falls on all
            for name in names:
                found[name].append(train(name, seed, arguments, Path(folder)))
    rows = [row(name, outcomes) for name, outcomes in found.items()]
    apart = [
        [f"{one} − {other}", *between(found[one], found[other])]
        for one, other in DIFFERENCES
        if {one, other} <= {*found}
    ]
    for line in apart:
        print(f"{line[0]}: sampled {line[1]}, greedy {line[2]} (points, 95% over {len(seeds)} seeds)")
    return finish(
        "algorithms",
        header=("run", "greedy before", "after", "sampled before", "after", "largest gap", "seconds"),
        rows=rows,
        ratios={f"{name}: sampled, after": statistics.fmean(one.sampled[1] for one in found[name]) for name in names},
        extra={
            "runs": {name: [vars(one) for one in outcomes] for name, outcomes in found.items()},
            "differences": apart,
        },
    )


def train(name: str, seed: int, arguments: argparse.Namespace, folder: Path) -> Outcome:
    """Train the quickstart's model once."""
    from agent import judge, run_agent

    algorithm, settings = RUNS[name]
    result = tune(
        workflow_func=run_agent,
        judge_func=judge,
        train_dataset=DatasetConfig(path=str(QUICKSTART / "data"), split="train", total_steps=arguments.steps),
        eval_dataset=DatasetConfig(path=str(QUICKSTART / "data"), split="test"),
        model=TunerModelConfig(model_path=str(QUICKSTART / "model"), max_model_len=512),
        algorithm=AlgorithmConfig(algorithm_type=algorithm, group_size=8, batch_size=16, learning_rate=3e-4),
        project_name="algorithms",
        experiment_name=f"{list(RUNS).index(name)}-{seed}",
        settings={
            "checkpoint_root_dir": str(folder),
            "seed": seed,
            "evaluation.max_tasks": arguments.held_out,
            "loss.kl": "none",
            "trainer.beta2": 0.95,
            "trainer.weight_decay": 0.0,
            **settings,
        },
    )
    summary = json.loads((result.run_dir / "summary.json").read_text(encoding="utf-8"))
    lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    gaps = [metrics.get("trainer/logprob_gap_max", 0.0) for metrics in map(json.loads, lines)]
    greedy, sampled = (
        (summary["before"][mode]["accuracy"], summary["after"][mode]["accuracy"]) for mode in ("greedy", "sampled")
    )
    return Outcome(greedy=greedy, sampled=sampled, gap=max(gaps), seconds=summary["seconds"])


def row(name: str, outcomes: Sequence[Outcome]) -> list[object]:
    """Means over the seeds; of the gap the largest."""
    ends = [
        statistics.fmean(getattr(one, mode)[end] for one in outcomes)
        for mode in ("greedy", "sampled")
        for end in (0, 1)
    ]
    return [name, *ends, f"{max(one.gap for one in outcomes):.1e}", statistics.fmean(one.seconds for one in outcomes)]


def between(one: Sequence[Outcome], other: Sequence[Outcome]) -> list[str]:
    """The differences of the accuracies after training, sampled and greedy."""
    return [
        str(difference([run.sampled[1] for run in one], [run.sampled[1] for run in other])),
        str(difference([run.greedy[1] for run in one], [run.greedy[1] for run in other])),
    ]


if __name__ == "__main__":
    sys.exit(main())
