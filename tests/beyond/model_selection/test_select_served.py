"""`select_model()` with models that are served here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sharpen import DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, select_model
from sharpen.beyond.model_selection import avg_token_consumption_judge
from sharpen.errors import ModelError


class Fixed:
    """A model of the owner, which is handed over as it is."""

    model_name = "fixed"


async def workflow(task: Any, model: Any) -> WorkflowOutput:
    if isinstance(model, Fixed):
        return WorkflowOutput(response="?")
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=task["n"] + 1)
    return WorkflowOutput(response=reply.usage.total_tokens)


async def judge(task: Any, response: Any) -> JudgeOutput:
    """What the workflow was told of its tokens is what the judge is told."""
    metrics = response["metrics"]
    assert metrics["usage"]["total_tokens"] == metrics["total_tokens"] == response["response"]
    return JudgeOutput(reward=metrics["total_tokens"])


def test_a_served_model_is_measured_and_its_configuration_returned(toy_model_dir: Path, dataset: DatasetConfig) -> None:
    served = [TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128) for _ in range(2)]
    figures: list[Any] = []
    for _ in range(2):
        arguments = {"workflow_func": workflow, "judge_func": judge, "train_dataset": dataset}
        chosen, found = asyncio.run(select_model(candidate_models=served, **arguments))
        assert chosen is served[0]  # the same model with the same noise: equal to the last token
        assert found["difference"] == 0.0
        figures.append(found)
    assert figures[0] == figures[1]


def test_served_models_and_the_owners_beside_each_other(toy_model_dir: Path, dataset: DatasetConfig) -> None:
    models = [Fixed(), TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128)]
    arguments = {"workflow_func": workflow, "judge_func": avg_token_consumption_judge, "train_dataset": dataset}
    chosen, found = asyncio.run(select_model(candidate_models=models, **arguments))
    assert chosen is models[1]  # of the other one nobody knows the tokens
    assert found["token_consumed_avg"] == -found["reward"] > 0


def test_a_folder_that_is_not_there_is_told_before_anything_runs(dataset: DatasetConfig) -> None:
    ran = []

    async def noted(task: Any, model: Any) -> float:
        ran.append(task)
        return 0.0

    models = [Fixed(), TunerModelConfig(model_path="./nowhere", max_model_len=128)]
    with pytest.raises(ModelError, match="nowhere"):
        asyncio.run(select_model(workflow_func=noted, judge_func=judge, train_dataset=dataset, candidate_models=models))
    assert not ran
