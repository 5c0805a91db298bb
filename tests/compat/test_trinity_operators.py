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
        (
            {"name": "multi_step_padding"},
            ("'multi_step_padding'", "no operator here", "file.py:function", "docs/use/operators.md"),
        ),
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


def tasks_converted(pipeline: dict[str, Any], **content: Any) -> ConfigFile:
    taskset = {"buffer": {"explorer_input": {"taskset": {"path": "./outputs/", "split": "train"}}}}
    return convert({**taskset, "data_processor": {"task_pipeline": pipeline}, **content}, "f.yaml", environment={})


def test_a_task_pipeline_is_data_juicer_s_operators_and_the_order_by_what_they_measured():
    scored = {"api_or_hf_model": "m", "min_score": 0.0}
    found = tasks_converted(
        {
            "num_process": 32,
            "operators": [{"name": "llm_difficulty_score_filter", "args": scored}, {"name": "words_num_filter"}],
            "inputs": ["tasks.jsonl"],
            "output": {"path": "./outputs/"},
            "target_fields": ["question", "answer"],
        },
        service={"data_juicer": {"auto_start": True}},
    )
    arguments = {
        "operators": [{"llm_difficulty_score_filter": scored}, {"words_num_filter": {}}],
        "text_key": "question",
        "num_process": 32,
    }
    assert found.settings["sampling"]["task_operators"] == [
        {"name": "data_juicer", "args": arguments},
        {"name": "priority_order", "args": {}},
    ]
    assert found.settings["train_dataset"]["path"] == "tasks.jsonl"
    assert found.origins["train_dataset", "path"] == "f.yaml: data_processor.task_pipeline.inputs"
    assert "service.data_juicer.auto_start: Data-Juicer runs within the run, without a server" in found.notices[-1]
    assert "task_pipeline.output: processed tasks are kept in memory, not written" in found.notices[-1]


def test_a_recipe_comes_first_and_operators_of_our_own_keep_their_places():
    found = tasks_converted({"config_path": "r.yaml", "operators": [{"name": "words_num_filter"}], "num_process": 4})
    (juicer, _) = found.settings["sampling"]["task_operators"]
    assert juicer == {"name": "data_juicer", "args": {"config_path": "r.yaml"}}
    assert "config_path comes first, as there" in found.notices[-1]
    names = ("text_length_filter", "difficulty_filter", "picks.py:odd", "words_num_filter")
    found = tasks_converted({"operators": [{"name": name} for name in names], "num_process": 1})
    assert [one["name"] for one in found.settings["sampling"]["task_operators"]] == [
        *("data_juicer", "difficulty_filter", "picks.py:odd", "data_juicer", "priority_order")
    ]


def test_priorities_are_the_arguments_of_an_order():
    weights = {"difficulty": -0.5, "quality": 2.0, "diversity": 0.8}
    found = tasks_converted({"operators": [], "priority_weights": weights, "top_k": 20})
    (order,) = found.settings["sampling"]["task_operators"]
    assert order == {"name": "priority_order", "args": {"weights": {"difficulty": -0.5, "quality": 2.0}, "top_k": 20}}
    assert "diversity are measured by no operator" in " ".join(found.notices)
    (order,) = tasks_converted({"top_k": -1, "priority_weights": {"diversity": 1}}).settings["sampling"][
        "task_operators"
    ]
    assert order["args"] == {"weights": {"quality": 0.0}}


def test_rows_are_processed_too_and_evaluations_are_not():
    rows = {"trainer_input": {"experience_buffer": {"path": "./outputs/", "format": {"prompt_type": "plaintext"}}}}
    pipeline = {"operators": [{"name": "human_preference_annotation_mapper"}], "inputs": ["demo.jsonl"]}
    found = tasks_converted(pipeline, buffer=rows, algorithm={"algorithm_type": "dpo"}, mode="train")
    assert found.settings["train_dataset"]["path"] == "demo.jsonl"
    assert found.settings["sampling"]["task_operators"][0]["name"] == "data_juicer"
    evaluation = {"explorer_input": {"eval_tasksets": [{"path": "e.jsonl"}]}}
    found = tasks_converted(pipeline, buffer=evaluation, mode="bench")
    assert "task_operators" not in found.settings.get("sampling", {})
    assert "an evaluation runs all tasks as they are" in found.notices[-1]


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ({"inputs": ["a", "b"]}, ("task_pipeline.inputs", "join the files")),
        ({"target_fields": "question"}, ("task_pipeline.target_fields", "list of fields")),
        ({"operators": [{"title": "x"}]}, ("operators[0]", "name and args")),
        ({"num_process": "many"}, ("task_pipeline.num_process", "whole number")),
        ({"priority_weights": [1]}, ("task_pipeline.priority_weights", "section")),
    ],
)
def test_what_a_task_pipeline_cannot_be_is_said(pipeline, words):
    with pytest.raises(ConfigError) as error:
        tasks_converted(pipeline)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_rollouts_have_data_juicer_s_operators_in_this_process():
    found = converted({"name": "data_juicer", "args": {"config_path": "r.yaml", "np": 4}})
    assert found.settings["sampling"]["operators"] == [{"name": "data_juicer", "args": {"config_path": "r.yaml"}}]
    assert f"{KEY}: rollouts are processed in this process" in found.notices[-1]


def test_operators_of_r3l_have_their_counterparts():
    found = converted({"name": "OPMD_filter"}, {"name": "RAFT_filter"})
    assert found.settings["sampling"]["operators"] == [
        {"name": "invalid_reward_filter", "args": {}},
        {"name": "reward_filter", "args": {"threshold": 0.3}},
    ]
    lines = " ".join(found.notices)
    assert "OPMD_filter, an operator of R3L's, is invalid_reward_filter" in lines
    assert "RAFT_filter, an operator of R3L's, is reward_filter: it drops rewards below 0.3" in lines
