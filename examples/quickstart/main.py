"""`make quickstart`: tune the quickstart agent's model on a CPU and show what came out.

In: `--seed`, `--engine`, `--execution`, the shipped model and data. Out: a run directory under
`checkpoints/Quickstart/`, whose path is the last line.
"""

import argparse
from pathlib import Path

from agent import judge, run_agent

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune

HERE = Path(__file__).parent


def main() -> None:
    """Train for 40 steps of 16 tasks x 8 rollouts."""
    parser = argparse.ArgumentParser(description="Tune the quickstart agent.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--engine", choices=["auto", "embedded", "vllm"], default="auto")
    parser.add_argument("--execution", choices=["local", "ray"], default="local")
    arguments = parser.parse_args()
    data = str(HERE / "data")
    tune(
        workflow_func=run_agent,
        judge_func=judge,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=arguments.steps),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=TunerModelConfig(model_path=str(HERE / "model"), max_model_len=512),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=8, batch_size=16, learning_rate=3e-4),
        project_name="Quickstart",
        settings={
            "seed": arguments.seed,
            "engine": {"type": arguments.engine},
            "execution": arguments.execution,
            "loss": {"kl": "none"},
            "trainer": {"beta2": 0.95, "weight_decay": 0.0},
            "evaluation": {"further": {"further": {"path": f"{data}/further.jsonl"}}},
        },
    )


if __name__ == "__main__":
    main()
