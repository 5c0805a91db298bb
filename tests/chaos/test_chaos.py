"""A small run under failures of agent, judge and engine; `make chaos` is the whole quickstart under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chaos import Chance, faulty, faulty_engines, faulty_judge, trained_failures

from sharpen import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from sharpen.learning.experience.reading import read_groups


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    return WorkflowOutput(response=reply.choices[0].message.content)


async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
    return JudgeOutput(reward=float(len(response or "") % 2))


def test_failures_of_every_kind_cost_attempts_and_nothing_else(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path
) -> None:
    """Without hangs, which cost their time limit."""
    chance = Chance(0)
    with faulty_engines(chance):
        result = tune(
            workflow_func=faulty(workflow, chance, hang=0.0),
            judge_func=faulty_judge(judge, chance),
            train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128, max_tokens=4),
            algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=8, batch_size=4, learning_rate=1e-4),
            settings={
                "checkpoint_root_dir": str(tmp_path),
                "check.enabled": False,
                "engine.type": "embedded",
                "evaluation": {"before_and_after": False, "hold_out": False},
                "rollout": {"max_excluded_share": 1.0, "timeout_s": 600},
            },
        )
    assert all(chance.drawn[what] for what in ("crash", "judge", "engine"))
    groups = list(read_groups(result.run_dir / "run.db"))
    assert [len(group.rollouts) for group in groups] == [8] * 8
    assert sum(len(group.attempts) for group in groups) > 0
    assert not trained_failures(result.run_dir)
    assert result.steps == 2  # a broken certificate would have stopped it


def test_the_failures_of_a_kind_do_not_depend_on_what_else_is_drawn() -> None:
    """Red when all kinds share one row of draws: by the order of the threads a kind may then never happen."""
    alone, among = Chance(0), Chance(0)
    for number in range(200):
        alone.happens("judge", 0.1)
        for _ in range(number % 3):
            among.happens("crash", 0.3)
        among.happens("judge", 0.1)
    assert alone.drawn["judge"] == among.drawn["judge"] > 0
