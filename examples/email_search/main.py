"""Tune an agent that searches an inbox with SQLite tools; another model judges its answers with a rubric."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from email_search.agent import judge, run_agent
from email_search.make_data import write_inbox
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
    """What the stand-in for a judge says: the true answer must occur in the given one."""
    case = read_case(messages[-1]["content"])
    given = case["given_answer"]
    return verdict_text({"correct": case["true_answer"] in given, "brief": len(given.split()) <= 30})


def main(argv: list[str] | None = None, judging_rule: Reply = rule) -> TuneResult:
    """Write the inbox, then train. Without --judge, `judging_rule` judges."""
    arguments = with_judge(options(__doc__, data=HERE / "data")).parse_args(argv)
    data = write_inbox(arguments.data)
    with judge_config(arguments, judging_rule) as judging:
        return tune(
            workflow_func=run_agent,
            judge_func=judge,
            train_dataset=DatasetConfig(path=str(data), split="train", total_steps=arguments.steps),
            eval_dataset=DatasetConfig(path=str(data), split="test"),
            model=model_config(arguments),
            auxiliary_models={"judge": judging},
            algorithm=algorithm_config(arguments),
            project_name="EmailSearch",
            settings={**settings(arguments), "workflow_args": {"database": str(data / "emails.db")}},
        )


if __name__ == "__main__":
    main()
