"""What `tune_prompt()` refuses before anything is loaded, and what the import of it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from levels import INITIAL, judge, scripted, workflow, write

from sharpen import DatasetConfig, PromptTuneConfig, TunerModelConfig, tune_prompt
from sharpen.errors import ConfigError, DatasetError


def refused(train: DatasetConfig, **changes: Any) -> Any:
    given = {"workflow": workflow, "init_system_prompt": INITIAL, "judge_func": judge, "train_dataset": train}
    return tune_prompt(**{**given, **changes})


async def no_prompt(task: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init_system_prompt": 3}, r"init_system_prompt must be a string.*3 \(int\)"),
        ({"init_system_prompt": " \n"}, "init_system_prompt is empty"),
        ({"workflow": no_prompt}, "workflow `no_prompt` takes task, but not system_prompt"),
        ({"judge_func": no_prompt}, "judge_func `no_prompt` takes task, but not response"),
        ({"judge_func": None}, "judge_func is None"),
        ({"settings": {"rollout.timeout": 1}}, "timeout_s"),
        ({"settings": {"execution": "ray"}}, "one machine"),
        ({"model": TunerModelConfig(model_path="m", max_model_len=8)}, "takes task, system_prompt, but not model"),
    ],
)
def test_arguments(train: DatasetConfig, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refused(train, **change)


@pytest.mark.parametrize("name", ["", 5, None])
def test_what_proposes_must_be_a_model(train: DatasetConfig, name: Any) -> None:
    with pytest.raises(ConfigError, match=rf"lm_model_name.*got {name!r}"):
        refused(train, config=PromptTuneConfig(lm_model_name=name))


def test_one_task_leaves_none_to_validate_on(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="1 task, which leaves none to validate"):
        refused(write(tmp_path / "one.jsonl", range(1)))


@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset"])
def test_an_empty_dataset(tmp_path: Path, train: DatasetConfig, which: str) -> None:
    empty = write(tmp_path / "empty.jsonl", range(0))
    with pytest.raises(DatasetError, match="empty"):
        refused(train, **{which: empty})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimization_level": "lihgt"}, "optimization_level.*'lihgt'"),
        ({"optimization_level": None}, "num_candidates.*`light` proposes 6"),
        ({"num_candidates": 4}, "optimization_level 'light' decides"),
        ({"optimizer": "copro"}, "optimizer.*'copro'"),
        ({"eval_num_threads": 0}, "eval_num_threads"),
        ({"lm_model": "x"}, "lm_model_name"),
    ],
)
def test_configuration(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptTuneConfig(**fields)


def test_the_fields_and_defaults_of_agentscope() -> None:
    config = PromptTuneConfig()
    assert (config.lm_model_name, config.optimization_level) == ("dashscope/qwen-plus", "light")
    assert (config.eval_display_progress, config.eval_display_table, config.eval_num_threads) == (True, 5, 16)
    assert config.compare_performance


def test_nothing_is_asked_before_the_input_is_checked(train: DatasetConfig, tmp_path: Path) -> None:
    lm, engine = scripted(5)
    with pytest.raises(DatasetError, match="nowhere"):
        refused(train, config=PromptTuneConfig(lm_model_name=lm), eval_dataset=DatasetConfig(path="./nowhere"))
    assert not engine.asked


@pytest.mark.parametrize(("missing", "optimizer"), [("optuna", "miprov2"), ("gepa", "gepa")])
def test_a_package_that_is_missing_is_named_and_the_import_loads_none(
    train: DatasetConfig, missing: str, optimizer: str
) -> None:
    code = f"""
import sys
from sharpen import DatasetConfig, JudgeOutput, PromptTuneConfig, tune_prompt
from sharpen.beyond.prompt_tune import tune_prompt as same
assert same is tune_prompt
assert not {{"dspy", "gepa", "optuna", "litellm"}} & set(sys.modules)
sys.modules[{missing!r}] = None
async def workflow(task, system_prompt): ...
async def judge(task, response): ...
tune_prompt(workflow=workflow, init_system_prompt="x", judge_func=judge,
    train_dataset=DatasetConfig(path={train.path!r}), config=PromptTuneConfig(optimizer={optimizer!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert "ConfigError" in last, done.stderr
    assert f"the package {missing}: pip install" in last
    assert "prompts" in last
