"""The names of AgentScope's tuner, of every time: what each is here, and what is refused by name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

import sharpen
from sharpen import Algorithm, AlgorithmConfig, Dataset, DatasetConfig, TunerChatModel, TunerModelConfig
from sharpen.config.load import resolve
from sharpen.errors import ConfigError, SharpenError

ROWS = [{"question": "What is 2 + 2?", "answer": "4"}, {"question": "What is 4 + 4?", "answer": "8"}]


@pytest.fixture
def my_dataset(tmp_path: Path) -> str:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(tmp_path)


def test_the_first_editions_preview_goes_by_column(my_dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"question": ["What is 2 + 2?", "What is 4 + 4?"], "answer": ["4", "8"]}
    assert Dataset(path=my_dataset, split="train").preview() == columns
    assert json.loads(capsys.readouterr().out) == columns
    assert Dataset(path=my_dataset).preview(1) == {"question": ["What is 2 + 2?"], "answer": ["4"]}


def test_the_second_editions_preview_goes_by_row(my_dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert DatasetConfig(path=my_dataset, split="train").preview() == ROWS
    assert json.loads(capsys.readouterr().out) == ROWS


def test_columns_of_rows_that_lack_a_field(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    assert Dataset(path=str(tmp_path)).preview() == {"a": [1, None], "b": [None, 2]}


def test_earlier_names_are_the_same_settings() -> None:
    for earlier, now in ((Dataset, DatasetConfig), (TunerChatModel, TunerModelConfig), (Algorithm, AlgorithmConfig)):
        assert issubclass(earlier, now)
        assert earlier.model_fields.keys() == now.model_fields.keys()
    arguments = {
        "train_dataset": Dataset(path="data"),
        "model": TunerChatModel(model_path="m", max_model_len=64, reasoning_parser=None),
        "algorithm": Algorithm(group_size=4),
    }
    config = resolve(arguments=arguments).config
    assert (config.train_dataset.path, config.model.reasoning_parser, config.algorithm.group_size) == ("data", None, 4)


@pytest.mark.parametrize("name", ["TinkerConfig"])
def test_what_is_not_included_says_so(name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name} is not part of Sharpen: .*agentscope.tuner") as raised:
        exec(f"from sharpen import {name}")
    assert isinstance(raised.value, SharpenError)
    assert name not in dir(sharpen)


def test_a_name_that_nobody_knows_is_an_ordinary_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'tunee'"):
        exec("from sharpen import tunee")


def test_every_public_name_can_be_had() -> None:
    assert [getattr(sharpen, name) for name in sharpen.__all__]


@pytest.mark.parametrize("model", [TunerModelConfig, TunerChatModel])
def test_hosted_training_is_refused_by_name(model: type[TunerModelConfig]) -> None:
    assert model(model_path="m", max_model_len=64, tinker_config=None) == model(model_path="m", max_model_len=64)
    with pytest.raises(ConfigError, match="has a tinker_config, which is not part of Sharpen"):
        model(model_path="m", max_model_len=64, tinker_config={"rank": 16})
    with pytest.raises(ConfigError, match="'model' has a tinker_config"):
        resolve(
            {"train_dataset": {"path": "d"}, "model": {"model_path": "m", "max_model_len": 64, "tinker_config": {}}}
        )


def test_the_oldest_form_gives_workflow_and_file_by_position() -> None:
    async def workflow(task, model) -> float:
        return 1.0

    assert inspect.signature(sharpen.tune).bind(workflow, "config.yaml").arguments == {
        "workflow_func": workflow,
        "config_path": "config.yaml",
    }
    with pytest.raises(ConfigError, match=r"nowhere/config\.yaml"):
        sharpen.tune(workflow, "nowhere/config.yaml")


def test_the_checks_of_the_two_functions_are_value_errors() -> None:
    async def workflow(task, model): ...
    async def judge(task, response): ...

    sharpen.check_workflow_function(workflow)
    sharpen.check_judge_function(judge)
    with pytest.raises(ValueError, match="task, response, but not model"):
        sharpen.check_workflow_function(judge)
    with pytest.raises(ValueError, match="task, model, but not response"):
        sharpen.check_judge_function(workflow)
