"""The names of AgentScope's tuner, with its defaults, as scripts that change their import lines use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sharpen
from sharpen.compat.agentscope import tuner
from sharpen.errors import NotIncludedError

SMALL = {"evaluation.hold_out": False, "check.enabled": False}


async def workflow(task: Any, model: Any) -> sharpen.WorkflowOutput:
    answer = await model.client.chat.completions.create(model=model.name, messages=[{"role": "user", "content": "?"}])
    return sharpen.WorkflowOutput(reward=float(len(answer.choices[0].message.content or "")))


@pytest.fixture
def arguments(toy_model_dir: Path, toy_dataset: Path) -> dict[str, Any]:
    return {
        "workflow_func": workflow,
        "train_dataset": tuner.DatasetConfig(path=str(toy_dataset), total_steps=1),
        "model": tuner.TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64, max_tokens=4),
        "algorithm": tuner.AlgorithmConfig(group_size=2, batch_size=2),
    }


@pytest.mark.parametrize(
    ("more", "project"),
    [({}, "AgentScope"), ({"project_name": "mine"}, "mine"), ({"settings": {"project": "other"}}, "other")],
)
def test_a_run_without_a_project_is_in_agentscopes(
    arguments: dict[str, Any], tmp_path: Path, more: dict[str, Any], project: str
) -> None:
    """Red where the names that stand for AgentScope's have our own default."""
    settings = {**SMALL, "checkpoint_root_dir": str(tmp_path), **more.pop("settings", {})}
    assert tuner.tune(**arguments, **more, settings=settings).run_dir.parent == tmp_path / project


def test_a_files_project_is_the_runs(arguments: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("project: of_the_file\n")
    settings = {**SMALL, "checkpoint_root_dir": str(tmp_path)}
    found = tuner.tune(**arguments, config_path=str(file), settings=settings)
    assert found.run_dir.parent == tmp_path / "of_the_file"


def test_every_name_of_the_tuner_is_ours() -> None:
    from sharpen.compat.agentscope.tuner.model_selection import avg_time_judge, avg_token_consumption_judge
    from sharpen.compat.agentscope.tuner.prompt_tune import PromptTuneConfig

    assert sharpen.beyond.model_selection.avg_time_judge is avg_time_judge
    assert callable(avg_token_consumption_judge)
    assert tuner.PromptTuneConfig is PromptTuneConfig
    for name in tuner.__all__:
        if name == "TinkerConfig":
            with pytest.raises(NotIncludedError, match="TinkerConfig"):
                getattr(tuner, name)
        elif name != "tune":
            assert getattr(tuner, name) is getattr(sharpen, name)
    with pytest.raises(AttributeError, match="nothing_of_it"):
        _ = tuner.nothing_of_it
