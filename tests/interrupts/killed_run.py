"""Runs in processes of their own, to be killed. Two updates a step.

`python killed_run.py FOLDER MODEL DATASET` forks one for each line of JSON that it reads (`Orders`), after it has
imported what takes long; it writes the id of the process, and when that has ended how.
"""

import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai.resources.chat  # noqa: F401 (before the forks)
import torch  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from aims import Aim, Trap
from step_walks import letters

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune

STEPS = 16
KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {"deterministic": True},
    "asynchronous": {"sync.style": "fully_async", "sync.max_staleness": 4},
    "with Ray": {"deterministic": True, "execution": "ray", "cluster.num_workers": 1},
}
"""Settings of the kinds of runs. Where they are deterministic, their weights are the same to the last bit."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Which run to begin or to go on with, and where it is to kill itself, if anywhere."""

    name: str
    kind: str = "synchronous"
    aim: Aim | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Orders":
        content = json.loads(line)
        aim = content.pop("aim")
        return cls(**content, aim=None if aim is None else Aim(*aim))


def main(folder: Path, model: Path, dataset: Path, orders: Orders) -> Path:
    """Run, or go on; the run directory."""
    return tune(
        workflow_func=letters,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=STEPS),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo", group_size=4, batch_size=4, learning_rate=1e-3, save_interval_steps=1
        ),
        project_name="P",
        experiment_name=orders.name,
        settings={
            "checkpoint_root_dir": str(folder),
            "check.enabled": False,
            "evaluation": {"before_and_after": False, "hold_out": False},
            "trainer.num_minibatches": 2,
            **KINDS[orders.kind],
        },
    ).run_dir


def serve(folder: Path, model: Path, dataset: Path) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _run(folder, model, dataset, Orders.from_json(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(folder: Path, model: Path, dataset: Path, orders: Orders) -> None:
    code = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the pipe is the parent's
    try:
        if orders.aim is not None:
            Trap(orders.aim).set()
        main(folder, model, dataset, orders)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(*map(Path, sys.argv[1:4]))
