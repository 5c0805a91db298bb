"""Configuration: where each value comes from, and what its owner reads when something is wrong."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from sharpen.compat.files import load_config
from sharpen.config.load import parse_assignments, resolve, write_resolved
from sharpen.config.public import AlgorithmConfig, DatasetConfig, TunerModelConfig
from sharpen.errors import ConfigError

SMALLEST = {"train_dataset": {"path": "data"}, "model": {"model_path": "m", "max_model_len": 64}}


def with_(**more):
    return {**SMALLEST, **more}


def test_smallest_configuration_has_the_defaults_of_the_spec():
    resolved = resolve(SMALLEST)
    algorithm = resolved.config.algorithm
    assert (algorithm.algorithm_type, algorithm.learning_rate) == ("multi_step_grpo", 1e-6)
    assert (algorithm.group_size, algorithm.batch_size) == (8, 32)
    assert resolved.origins["algorithm.group_size"] == "default"
    assert resolved.origins["model.max_model_len"] == "run.yaml"
    assert resolved.origins["eval_dataset"] == "default"
    assert resolved.overrides == ()


def test_arguments_override_settings_override_the_file_and_each_is_said():
    resolved = resolve(
        with_(algorithm={"group_size": 4, "batch_size": 2, "learning_rate": "1e-4"}),
        {"algorithm.group_size": 6, "loss": {"kl": "k3"}},
        {"algorithm": AlgorithmConfig(group_size=16), "project_name": None, "seed": 3},
    )
    algorithm = resolved.config.algorithm
    assert (algorithm.group_size, algorithm.batch_size, algorithm.learning_rate) == (16, 2, 1e-4)
    assert resolved.config.loss.kl == "k3"
    assert resolved.overrides == (
        "override: algorithm.group_size = 6 (argument) instead of 4 (run.yaml)",
        "override: algorithm.group_size = 16 (argument) instead of 6 (argument)",
    )
    origins = resolved.origins
    assert origins["algorithm.group_size"] == origins["seed"] == origins["loss.kl"] == "argument"
    assert origins["algorithm.batch_size"] == "run.yaml"
    assert origins["algorithm.save_interval_steps"] == "default"


def test_a_dataset_argument_replaces_the_files_dataset_whole():
    file = with_(train_dataset={"path": "gsm8k", "name": "main"})
    resolved = resolve(file, None, {"train_dataset": DatasetConfig(path="mine.jsonl")})
    assert resolved.config.train_dataset == DatasetConfig(path="mine.jsonl")
    assert resolved.origins["train_dataset.name"] == "default"
    assert resolved.overrides == (
        "override: train_dataset.path = 'mine.jsonl' (argument) instead of 'gsm8k' (run.yaml)",
        "override: train_dataset.name = 'main' (run.yaml) does not apply: an argument replaces its section",
    )


def test_sources_are_left_as_they_were():
    file = with_(algorithm={"group_size": 4})
    resolve(file, {"algorithm.group_size": 6})
    assert file["algorithm"] == {"group_size": 4}


def test_every_problem_is_named_at_once_with_the_nearest_setting():
    with pytest.raises(ConfigError) as caught:
        resolve(
            {
                "train_datset": {"path": "x"},
                "model": {"model_path": "m", "max_model_len": "long", "temperature": -1},
                "algorithm": {"group_sise": 4},
                "group_size": 4,
                "engine": {"batch_size": 2, "device": "gpu"},
                "monitor_type": "tensorbord",
                "trainer": 3,
                "name": 2024,
                "time_limit_s": True,
                "project": "a/b",
            }
        )
    first, *lines = str(caught.value).splitlines()
    assert first == "the configuration is not valid: 13 problems"
    assert sorted(lines) == sorted(
        [
            "  - 'project' must be the name of a folder, without separators, got 'a/b'",
            "  - 'name' must be text, got 2024 (put it in quotes)",
            "  - 'train_dataset' is missing",
            "  - 'model.max_model_len' must be a whole number, got 'long'",
            "  - 'model.temperature' must be at least 0, got -1",
            "  - 'algorithm.group_sise' is not a setting; did you mean 'algorithm.group_size'?",
            "  - 'engine.device' must be auto, cpu, cuda or cuda:<number>, got 'gpu'",
            "  - 'engine.batch_size' is not a setting; did you mean 'algorithm.batch_size' or 'expert.batch_size'?",
            "  - 'trainer' must be a section of settings, got 3",
            "  - 'monitor_type' must be 'tensorboard', 'wandb', 'mlflow', 'swanlab' or 'trackio' (or a part of your "
            "own: docs/use/extending.md), got 'tensorbord'; did you mean 'tensorboard'?",
            "  - 'time_limit_s' must be a number, got True",
            "  - 'train_datset' is not a setting; did you mean 'train_dataset'?",
            "  - 'group_size' is not a setting; did you mean 'algorithm.group_size'?",
        ]
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: resolve({"rollout.failure_reward": 0.0}),
            "'rollout.failure_reward' is not a setting by its name with dots: write 'failure_reward' in the section",
        ),
        (lambda: DatasetConfig(pth="x"), "'pth' is not a setting; did you mean 'path'?"),
        (lambda: DatasetConfig(), "DatasetConfig: 'path' is missing"),
        (lambda: TunerModelConfig(model_path="m", max_model_len=1), "'max_model_len' must be at least 2, got 1"),
        (lambda: AlgorithmConfig(learning_rate=float("nan")), "'learning_rate' must be a finite number, got nan"),
        (lambda: AlgorithmConfig(batch_size=1.5), "'batch_size' must be a whole number, got 1.5"),
        (lambda: AlgorithmConfig(foo=1), "'foo' is not a setting; there are algorithm_type, learning_rate"),
    ],
)
def test_configuration_objects_made_in_python_speak_the_same_way(build, message):
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)
    assert "pydantic" not in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.problems == caught.value.problems


def test_yaml_points_to_files_beside_it_and_leaves_the_rest(tmp_path: Path):
    (tmp_path / "data.jsonl").touch()
    (tmp_path / "agent.py").touch()
    (tmp_path / "maths").mkdir()
    file = tmp_path / "run.yaml"
    file.write_text(
        "workflow: agent.py:run\njudge: elsewhere.judge:judge\n"
        "train_dataset: {path: data.jsonl}\neval_dataset: {path: openai/gsm8k, name: main}\n"
        "model: {model_path: Qwen/Qwen3-0.6B, max_model_len: 64}\n"
        "evaluation: {further: {hard: {path: data.jsonl}}}\n"
        "distill: {teachers: {law: Qwen/Qwen3-4B, maths: maths}, teacher_key: domain}\n"
    )
    content = load_config(file).settings
    assert content["train_dataset"]["path"] == str(tmp_path / "data.jsonl")
    assert content["evaluation"]["further"]["hard"]["path"] == str(tmp_path / "data.jsonl")
    assert content["distill"]["teachers"] == {"law": "Qwen/Qwen3-4B", "maths": str(tmp_path / "maths")}
    assert content["workflow"] == f"{tmp_path / 'agent.py'}:run"
    assert content["judge"] == "elsewhere.judge:judge"
    assert content["eval_dataset"]["path"] == "openai/gsm8k"
    assert resolve(content).config.model.model_path == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "line 3"),
        ("seed: 1\nmodel: {}\nseed: 2\n", "line 3, column 1: 'seed' is given twice"),
        ("- 1\n- 2\n", "must contain settings as 'name: value' lines, but contains a list"),
    ],
)
def test_yaml_that_cannot_be_read_is_said_with_its_line(tmp_path: Path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_configuration_file_is_said(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path / "none.yaml")


def test_an_empty_file_is_an_empty_configuration(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert load_config(tmp_path / "run.yaml").settings == {}


def test_assignments_are_yaml_values():
    settings = parse_assignments(["algorithm.learning_rate=1e-4", "name=null", "seed=3", "workflow=a.py:run"])
    assert settings == {"algorithm.learning_rate": "1e-4", "name": None, "seed": 3, "workflow": "a.py:run"}
    resolved = resolve(with_(name="fixed"), settings)
    assert resolved.config.algorithm.learning_rate == 1e-4
    assert resolved.config.name is None
    with pytest.raises(ConfigError, match="key=value"):
        parse_assignments(["seed"])


def test_resolved_json_holds_every_value_and_its_origin(tmp_path: Path):
    resolved = resolve(SMALLEST, {"seed": 7})
    write_resolved(tmp_path / "resolved.json", resolved, {"engine.device": "cpu"})
    entries = json.loads((tmp_path / "resolved.json").read_text())
    assert entries["seed"] == {"value": 7, "origin": "argument"}
    assert entries["train_dataset.path"] == {"value": "data", "origin": "run.yaml"}
    assert entries["trainer.eps"] == {"value": 1e-8, "origin": "default"}
    assert entries["engine.device"] == {"value": "cpu", "origin": "derived"}
    assert set(resolved.origins) <= set(entries)
    assert [path.name for path in tmp_path.iterdir()] == ["resolved.json"]
