"""What was made under the former name opens; nothing else knows it."""

import json
import subprocess
from pathlib import Path

import pytest

from sharpen.certify import read_resolved
from sharpen.compat.trinity import MathRewardFn
from sharpen.config.former import current, former_run
from sharpen.config.functions import import_function
from sharpen.execution.same_run import read_recorded

ROOT = Path(__file__).parents[2]
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
