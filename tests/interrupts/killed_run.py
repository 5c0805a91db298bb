"""A run of its own process, to be killed: `python killed_run.py FOLDER MODEL DATASET NAME`. Two updates a step."""

import sys
from pathlib import Path

from step_walks import letters

from agenttune import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune

STEPS = 16


def main(folder: Path, model: Path, dataset: Path, name: str) -> Path:
    """Run, or go on; the run directory."""
    return tune(
        workflow_func=letters,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=STEPS),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo", group_size=4, batch_size=4, learning_rate=1e-3, save_interval_steps=2
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


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4])
