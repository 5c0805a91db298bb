"""The operators of Trinity-RFT's files: `data_processor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharpen.compat.files import load_config
from sharpen.compat.trinity.yaml.conversion import convert
from sharpen.config.load import ConfigFile
from sharpen.errors import ConfigError

KEY = "data_processor.experience_pipeline.operators"


def converted(*operators: Any, **content: Any) -> ConfigFile:
    pipeline = {"experience_pipeline": {"operators": list(operators)}}
    return convert({"data_processor": pipeline, **content}, "f.yaml", environment={})


def test_operators_on_experiences_are_those_on_rollouts():
    shaping = [{"stats_key": "score", "op_type": "ADD", "weight": 1.0}]
    found = converted(
        {"name": "reward_filter", "args": {"threshold": 0.5}},
        {"name": "reward_std_filter"},
        {"name": "dapo_dynamic_sampling", "args": {"metric_key": "accuracy"}},
        {"name": "invalid_reward_filter", "args": None},
        {"name": "reward_shaping_mapper", "args": {"reward_shaping_configs": shaping}},
        {"name": "rewards.py:longer_is_worse", "args": {"per_token": 0.001}},
        {"name": "my_package.rewards.shorter"},
    )
    assert found.settings["sampling"]["operators"] == [
        {"name": "reward_filter", "args": {"threshold": 0.5}},
        {"name": "reward_std_filter", "args": {}},
        {"name": "dapo_dynamic_sampling", "args": {"metric_key": "accuracy"}},
        {"name": "invalid_reward_filter", "args": {}},
        {"name": "reward_shaping_mapper", "args": {"reward_shaping_configs": shaping}},
        {"name": "rewards.py:longer_is_worse", "args": {"per_token": 0.001}},
        {"name": "my_package.rewards:shorter", "args": {}},
    ]
    assert found.origins["sampling", "operators"] == f"f.yaml: {KEY}"


def test_a_mask_of_cut_answers_is_a_setting_whose_difference_is_told():
    found = converted({"name": "mask_response_truncated"}, {"name": "dapo_dynamic_sampling"})
    assert found.settings["sampling"]["overlong_filter"] is True
    assert [one["name"] for one in found.settings["sampling"]["operators"]] == ["dapo_dynamic_sampling"]
    line = next(line for line in found.notices if "mask_response_truncated" in line)
    assert "sampling.overlong_filter" in line
    assert "mean and deviation" in line


def test_rows_have_no_experiences_to_operate_on():
    found = converted({"name": "reward_filter"}, algorithm={"algorithm_type": "sft"}, mode="train")
    assert "operators" not in found.settings.get("sampling", {})
    assert f"{KEY}: sft learns from rows, without rollouts" in found.notices[-1]


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ({"name": "reward_fliter"}, ("operators[0].name", "'reward_fliter'", "did you mean 'reward_filter'?")),
        ({"name": "OPMD_filter"}, ("'OPMD_filter'", "no operator here", "file.py:function", "docs/use/operators.md")),
        ({"args": {}}, ("operators[0]'", "name and args")),
        ({"name": "reward_filter", "arguments": {}}, ("operators[0]'", "name and args", "arguments")),
        ({"name": "reward_filter", "args": [1]}, ("operators[0]'", "[1]")),
        ("reward_filter", ("operators[0]'", "got 'reward_filter'")),
    ],
)
def test_what_is_no_operator_is_said(operator, words):
    with pytest.raises(ConfigError) as error:
        converted(operator)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_list_is_needed():
    with pytest.raises(ConfigError, match="must be a list of operators"):
        convert(
            {"data_processor": {"experience_pipeline": {"operators": {"name": "reward_filter"}}}},
            "f.yaml",
            environment={},
        )


@pytest.mark.parametrize(
    "text",
    [
        "data_processor: {experience_pipeline: {operators: [{name: 'rewards.py:shorter'}, {name: reward_filter}]}}",
        "sampling: {operators: [{name: 'rewards.py:shorter'}, {name: reward_filter}]}",
    ],
)
def test_a_file_of_operators_beside_the_settings_is_meant(tmp_path: Path, text: str):
    (tmp_path / "rewards.py").write_text("def shorter(groups): return groups\n")
    (tmp_path / "f.yaml").write_text(text)
    names = [one["name"] for one in load_config(tmp_path / "f.yaml").settings["sampling"]["operators"]]
    assert names == [f"{tmp_path / 'rewards.py'}:shorter", "reward_filter"]
