"""Tune an assistant that asks the user back or answers; a second model plays the user and judges."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from ask_or_answer.agent import judge, run_agent
from ask_or_answer.make_data import write_requests
from parts.command_line import (
    algorithm_config,
    judge_config,
    model_config,
    options,
    settings,
    with_judge,
)
from parts.model_judge import read_case, verdict_text
from parts.stand_in import Message, Reply

from sharpen import DatasetConfig, TuneResult, tune

HERE = Path(__file__).resolve().parent


def rule(messages: Sequence[Message]) -> str:
    """What the stand-in says, as user (the name) and as judge (the true answer must occur in the given one)."""
    case = read_case(messages[-1]["content"])
    if "you_mean" in case:
        return f"I mean {case['you_mean']}."
    return verdict_text({"correct": case["true_answer"] in case["given_answer"]})


def main(argv: list[str] | None = None, judging_rule: Reply = rule) -> TuneResult:
    """Write the requests, then train. Without --judge, `judging_rule` plays the user and judges."""
    arguments = with_judge(options(__doc__, data=HERE / "data")).parse_args(argv)
    data = str(write_requests(arguments.data))
    with judge_config(arguments, judging_rule) as second:
        return tune(
            workflow_func=run_agent,
            judge_func=judge,
            train_dataset=DatasetConfig(path=data, split="train", total_steps=arguments.steps),
            eval_dataset=DatasetConfig(path=data, split="test"),
            model=model_config(arguments),
            auxiliary_models={"user": second, "judge": second},
            algorithm=algorithm_config(arguments),
            project_name="AskOrAnswer",
            settings=settings(arguments),
        )


if __name__ == "__main__":
    main()
