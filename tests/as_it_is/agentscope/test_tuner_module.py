"""What AgentScope's own tests of its tuner (1.0.21) ask of it, with the imports changed."""

from __future__ import annotations

import json
from logging import Logger
from pathlib import Path
from typing import Any

import pytest

from sharpen.compat.agentscope.tuner import (
    DatasetConfig,
    JudgeOutput,
    TunerModelConfig,
    WorkflowOutput,
    check_judge_function,
    check_workflow_function,
)

pytestmark = pytest.mark.as_it_is


async def with_all(
    task: dict[str, Any], model: TunerModelConfig, auxiliary_models: dict[str, TunerModelConfig], logger: Logger
) -> WorkflowOutput:
    return WorkflowOutput(response="said")


async def with_the_least(task: dict[str, Any], model: TunerModelConfig) -> WorkflowOutput:
    return WorkflowOutput(response="said")


async def without_model(task: dict[str, Any]) -> WorkflowOutput:
    return WorkflowOutput(response="said")


async def with_another(task: dict[str, Any], model: TunerModelConfig, aux_model: int) -> WorkflowOutput:
    return WorkflowOutput(response="said")


async def judge(
    task: dict[str, Any], response: Any, auxiliary_models: dict[str, TunerModelConfig], logger: Logger
) -> JudgeOutput:
    return JudgeOutput(reward=1.0)


async def judge_of_another_name(wrong_name: dict[str, Any], response: Any) -> JudgeOutput:
    return JudgeOutput(reward=1.0)


async def judge_without_task(response: Any) -> JudgeOutput:
    return JudgeOutput(reward=1.0)


@pytest.mark.parametrize("function", [with_all, with_the_least])
def test_a_workflow_may_take_what_it_needs(function: Any) -> None:
    check_workflow_function(function)


@pytest.mark.parametrize("function", [without_model, with_another])
def test_another_signature_of_a_workflow_is_a_value_error(function: Any) -> None:
    with pytest.raises(ValueError, match=function.__name__):
        check_workflow_function(function)


def test_signatures_of_judges() -> None:
    check_judge_function(judge)
    for function in (judge_of_another_name, judge_without_task):
        with pytest.raises(ValueError, match=function.__name__):
            check_judge_function(function)


def test_a_preview_has_as_many_rows_as_there_are_and_says_what_is_missing_by_kind(tmp_path: Path) -> None:
    """A path that is not there is an `OSError`, a split that is not there a `ValueError`."""
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in (2, 4, 8)]
    folder = tmp_path / "my_dataset"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetConfig(path=str(folder), split="train")
    assert dataset.preview(n=2) == rows[:2]
    assert len(dataset.preview(n=5)) == 3
    with pytest.raises(OSError, match="/invalid/path"):
        DatasetConfig(path="/invalid/path", split="train").preview()
    with pytest.raises(ValueError, match="invalid_split"):
        DatasetConfig(path=str(folder), split="invalid_split").preview()
