"""What was made under the former name opens; nothing else knows it."""

import json
import subprocess
from pathlib import Path

import pytest

from sharpen.compat.files import load_config
from sharpen.compat.trinity import MathRewardFn
from sharpen.config.former import current, former_run
from sharpen.config.functions import import_function
from sharpen.config.load import resolve
from sharpen.evidence.certificate.certify import read_resolved
from sharpen.run.same_run import RunRecord, changes, read_recorded

ROOT = Path(__file__).parents[2]
MODEL = {"model_path": "m", "max_model_len": 8}
REWARD = "compat.trinity.rewards:MathRewardFn"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (f"agenttune.{REWARD}", f"sharpen.{REWARD}"),
        ("agenttune:tune", "sharpen:tune"),
        ("my_agenttune.module:f", "my_agenttune.module:f"),
        ("agenttune_agents.module:f", "agenttune_agents.module:f"),
        ("checkpoints/AgentTune/one/latest", "checkpoints/AgentTune/one/latest"),
        (["agenttune.errors.CallError", 1], ["sharpen.errors.CallError", 1]),
        (3, 3),
    ],
)
def test_names_of_modules_are_read_as_those_of_today(before, now):
    assert current(before) == now


def test_a_configuration_file_of_before_finds_our_functions():
    assert import_function(f"agenttune.{REWARD}") is MathRewardFn


def test_resolved_settings_of_before_are_the_same_run(tmp_path: Path):
    (tmp_path / "resolved.json").write_text(
        json.dumps(
            {
                "judge": {"value": f"agenttune.{REWARD}", "origin": "file"},
                "project": {"value": "AgentTune", "origin": "default"},
                "train_dataset.path": {"value": "d", "origin": "file"},
                "model.model_path": {"value": "m", "origin": "file"},
                "model.max_model_len": {"value": 8, "origin": "file"},
            }
        )
    )
    assert read_recorded(tmp_path).values["judge"] == f"sharpen.{REWARD}"
    config = read_resolved(tmp_path / "resolved.json")
    assert (config.judge, config.project) == (f"sharpen.{REWARD}", "AgentTune")


TASKSET = {"prompt_key": "question", "response_key": "response", "reward_fn_args.strict": True}


def test_a_configuration_file_with_the_section_of_before_means_the_one_of_today(tmp_path: Path):
    """Red when `load_config` does not go through `current_file`."""
    (tmp_path / "run.yaml").write_text(
        "workflow: math_workflow\ntaskset: {prompt_key: question}\ntrain_dataset: {path: d}\n"
        "model: {model_path: m, max_model_len: 8}\n"
    )
    assert resolve(load_config(tmp_path / "run.yaml")).config.task_args == {"prompt_key": "question"}


def test_recorded_settings_of_a_taskset_are_those_that_were_given(tmp_path: Path):
    """Of the section that had defaults. Red when its defaults are kept: no run made before could go on."""
    origins = {name: "default" if name == "response_key" else "file" for name in TASKSET}
    entries = {f"taskset.{name}": {"value": value, "origin": origins[name]} for name, value in TASKSET.items()}
    entries["train_dataset.path"] = {"value": "d", "origin": "file"}
    entries |= {f"model.{name}": {"value": value, "origin": "file"} for name, value in MODEL.items()}
    (tmp_path / "resolved.json").write_text(json.dumps(entries))
    task_args = {"prompt_key": "question", "reward_fn_args": {"strict": True}}
    assert read_resolved(tmp_path / "resolved.json").task_args == task_args
    before = read_recorded(tmp_path)
    assert before is not None
    now = {"train_dataset": {"path": "d"}, "model": MODEL, "task_args": task_args}
    assert changes(before, RunRecord.of(resolve(now).config, {})) == []
    now["task_args"] = {"prompt_key": "problem"}
    changed = {change.setting for change in changes(before, RunRecord.of(resolve(now).config, {}))}
    assert changed == {"task_args.prompt_key", "task_args.reward_fn_args.strict"}


def test_a_run_of_the_default_project_is_found_under_its_former_name(tmp_path: Path):
    former = tmp_path / "AgentTune" / "one"
    assert former_run(tmp_path, "Sharpen", "one") is None
    former.mkdir(parents=True)
    assert former_run(tmp_path, "Sharpen", "one") == former
    assert former_run(tmp_path, "Mine", "one") is None
    (tmp_path / "Sharpen" / "one").mkdir(parents=True)
    assert former_run(tmp_path, "Sharpen", "one") is None


def test_nothing_else_bears_the_former_name():
    listed = subprocess.run(["git", "grep", "-il", "agent" + "tune"], cwd=ROOT, capture_output=True, text=True)
    assert set(listed.stdout.split()) == {"src/sharpen/config/former.py", "tests/config/test_former.py"}
