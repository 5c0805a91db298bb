"""Runs in processes of their own, to be killed. Two updates a step.

`python killed_run.py FOLDER MODEL DATASET` forks one for each name that it reads, after it has imported what takes
long; it writes the id of the process, and when that has ended how.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401 (before the forks)
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from step_walks import letters

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune

STEPS = 16


def main(folder: Path, model: Path, dataset: Path, name: str) -> Path:
    """Run, or go on; the run directory."""
    return tune(
        workflow_func=letters,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=STEPS),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo", group_size=4, batch_size=4, learning_rate=1e-3, save_interval_steps=1
        ),
        project_name="P",
        experiment_name=name,
        settings={
            "checkpoint_root_dir": str(folder),
            "check.enabled": False,
            "evaluation": {"before_and_after": False, "hold_out": False},
            "deterministic": True,
            "trainer.num_minibatches": 2,
        },
    ).run_dir


def serve(folder: Path, model: Path, dataset: Path) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _run(folder, model, dataset, line.strip())
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(folder: Path, model: Path, dataset: Path, name: str) -> None:
    code = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the pipe is the parent's
    try:
        main(folder, model, dataset, name)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(*map(Path, sys.argv[1:4]))
