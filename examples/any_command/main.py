"""Tune an agent that is a shell script: each rollout starts it as a command, and its calls find the rollout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from any_command.workflow import run_agent
from parts.command_line import algorithm_config, model_config, options, settings
from quickstart.agent import judge

from sharpen import DatasetConfig, TuneResult, tune

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"


def main(argv: list[str] | None = None) -> TuneResult:
    """Train on the quickstart's word problems, or on any folder in GSM8K's layout."""
    arguments = options(
        __doc__,
        data=QUICKSTART / "data",
        steps=10,
        batch_size=16,
        group_size=8,
        learning_rate=3e-4,
        max_model_len=512,
        max_tokens=48,
    ).parse_args(argv)
    return tune(
        workflow_func=run_agent,
        judge_func=judge,
        train_dataset=DatasetConfig(path=str(arguments.data), split="train", total_steps=arguments.steps),
        eval_dataset=DatasetConfig(path=str(arguments.data), split="test"),
        model=model_config(arguments),
        algorithm=algorithm_config(arguments),
        project_name="AnyCommand",
        settings=settings(arguments),
    )


if __name__ == "__main__":
    main()
