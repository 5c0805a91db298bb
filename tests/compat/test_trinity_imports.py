"""`import trinity` where Trinity-RFT is not installed; plugin folders."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import forked

from sharpen.compat.trinity.imports.functions import (
    fix_fracs,
    get_logger,
    grade_answer,
    match_answer,
    math_equal,
    remove_right_units,
    timeout_limit,
    verify_math_answer,
)
from sharpen.compat.trinity.imports.stand_in import MODULES

USERS = """
from __future__ import annotations
from trinity.common.experience import EID, Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.rewards import REWARD_FUNCTIONS
from trinity.common.rewards.math_reward import MathBoxedRewardFn
from trinity.common.rewards.reward_fn import RewardFn
from trinity.common.workflows import WORKFLOWS
from trinity.common.workflows.customized_math_workflows import MathBoxedWorkflow, Task
from trinity.common.workflows.step_wise_workflow import RewardPropagationWorkflow
from trinity.common.workflows.workflow import MultiTurnWorkflow, SimpleWorkflow, Workflow
from trinity.utils.log import get_logger

logger = get_logger(__name__)


@REWARD_FUNCTIONS.register_module("says_e")
class SaysE(RewardFn):
    def __init__(self, **kwargs) -> None:
        pass

    def __call__(self, response, truth=None, **kwargs):
        return {"e": float("e" in response)}


@WORKFLOWS.register_module("one_call")
class OneCall(Workflow):
    def run(self):
        from trinity.common.workflows import envs  # a package without names

        answers = self.model.chat([{"role": "user", "content": self.task.task_desc}], max_tokens=4)
        scores = self.task.reward_fn(**self.task.reward_fn_args)(response=answers[0].response_text)
        return [
            Experience(tokens=answers[0].tokens, prompt_length=answers[0].prompt_length, reward=sum(scores.values()))
        ]
"""


def run(code: str, folder: Path, *paths: Path) -> str:
    """What a fresh process prints."""
    search = [str(Path(__file__).parents[2] / "src"), *map(str, paths)]
    program = f"import sys\nsys.path[:0] = {search!r}\n{code}"
    found = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


STAND_IN = "from sharpen.compat.trinity.imports.stand_in import stand_in, stands_in"


def test_every_name_of_the_table_is_there(tmp_path: Path):
    code = f"""{STAND_IN}
import importlib, json
assert stand_in() and stand_in() and stands_in()
from sharpen.compat.trinity.imports.stand_in import MODULES
for module, names in MODULES.items():
    for name in names:
        assert getattr(importlib.import_module(module), name) is not None, (module, name)
import trinity.common.workflows as flows
from sharpen.compat.trinity import Workflow
assert flows.Workflow is Workflow and "workflow" in dir(flows)
print("torch" in sys.modules, "done")
"""
    assert run(code, tmp_path) == "False done"


def test_what_we_lack_is_named(tmp_path: Path):
    lacking = {
        "from trinity.common.workflows import Worflow": "has no 'Worflow' of trinity.common.workflows; did you mean '",
        "from trinity.common.config import Config": "has no 'Config' of trinity.common.config",
        "from trinity.algorithm import ADD_STRATEGY": "has no 'ADD_STRATEGY' of trinity.algorithm",
        "import trinity.trainer.verl.dp_actor": "has no module 'trinity.trainer'",
        "from trinity.utils.log import EID": "it is in trinity.common.experience",
        "from verl import DataProto": "has no 'DataProto' of verl",
        "import verl.trainer": "has no module 'verl.trainer'",
    }
    for number, line in enumerate(lacking):
        (tmp_path / f"users{number}.py").write_text(f"{line}\n")
    code = f"""{STAND_IN}
from sharpen.config.functions import import_function
stand_in()
for number in range({len(lacking)}):
    try:
        import_function(f"users{{number}}.py:Flow")
    except ValueError as error:
        print(" ".join(str(error).split()))
"""
    lines = run(code, tmp_path).splitlines()
    for number, (said, (line, words)) in enumerate(zip(lines, lacking.items(), strict=True)):
        file = tmp_path / f"users{number}.py"
        assert said.startswith(f"{file} fails when it is imported: NotIncludedError: sharpen stands in")
        assert words in said
        assert f"pip install {'trinity-rft' if 'trinity' in line else 'verl'}" in said


def test_a_real_verl_is_left_alone(tmp_path: Path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl/__init__.py").write_text("real = True\n")
    code = f"""{STAND_IN}
assert stand_in()
import verl
try:
    import verl.utils.py_functional
except ModuleNotFoundError as error:
    print(verl.real, error)
"""
    assert run(code, tmp_path, tmp_path) == "True No module named 'verl.utils'"


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("0.33333", "1/3", True),
        ("0.33", "1/3", False),
        ("50", "0.5", True),
        (42, 42.0, True),
        ("2\\pi", "\\pi + \\pi", True),
        ("\\pi", "3.2", False),
        ("", "1", False),
    ],
)
def test_verl_s_equality(answer: object, truth: object, same: bool):
    assert math_equal(answer, truth) is same
    assert not math_equal("50", "0.5", include_percentage=False)


def test_verl_s_time_limit():
    @timeout_limit(seconds=0.1)
    def slow(seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    @timeout_limit(5, use_signals=True)
    def wrong() -> None:
        raise KeyError("x")

    assert slow(0.0) == "done"
    with pytest.raises(TimeoutError, match=r"slow took longer than 0\.1 seconds"):
        slow(1.0)
    with pytest.raises(KeyError):
        wrong()


def fake_trinity(folder: Path, *, installed: bool) -> Path:
    """A folder with a package `trinity` that has a Workflow of its own."""
    package = folder / "site" / "trinity" / "common" / "workflows"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class Workflow:\n    def run(self):\n        return []\n")
    if installed:
        metadata = folder / "site" / "trinity_rft-0.6.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trinity-rft\nVersion: 0.6.0\n")
    return folder / "site"


@pytest.mark.parametrize(
    ("installed", "shadow", "ours"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_an_installed_trinity_is_left_alone_unless_told_so(tmp_path: Path, installed: bool, shadow: bool, ours: bool):
    site = fake_trinity(tmp_path, installed=installed)
    code = f"""{STAND_IN}
print(stand_in(shadow={shadow}))
from trinity.common.workflows import Workflow
print(Workflow.__module__)
"""
    home = "sharpen.compat.trinity.workflow" if ours else "trinity.common.workflows"
    assert run(code, tmp_path, site).split() == [str(ours), home]


def test_a_class_of_an_installed_trinity_says_what_to_do(tmp_path: Path):
    site = fake_trinity(tmp_path, installed=True)
    (tmp_path / "users.py").write_text(
        "from trinity.common.workflows import Workflow\nclass Flow(Workflow):\n    pass\n"
    )
    code = f"""{STAND_IN}
from sharpen.compat.trinity import configured_workflow
assert not stand_in()
try:
    configured_workflow("users.py:Flow", None, None)
except ValueError as error:
    print(error)
try:
    stand_in(shadow=True)
except ValueError as error:
    print(error)
"""
    first, second = run(code, tmp_path, site).splitlines()
    assert first.startswith("Flow is a workflow class of the Trinity-RFT that is installed (trinity.common.workflows)")
    assert "pass --trinity-imports" in first
    assert "has been imported from" in second


@pytest.fixture
def trinity_yaml(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
project: p
name: n
checkpoint_root_dir: {tmp_path / "runs"}
algorithm: {{algorithm_type: grpo, repeat_times: 4, optimizer: {{lr: 1e-3}}}}
model: {{model_path: {toy_model_dir}, max_model_len: 64, max_response_tokens: 4}}
buffer:
  batch_size: 2
  total_steps: 2
  explorer_input:
    taskset:
      path: {toy_dataset}
      split: train
      format: {{prompt_key: question, response_key: answer}}
      default_workflow_type: one_call
      default_reward_fn_type: says_e
"""
    )
    return path


def sharpen(folder: Path, *arguments: str) -> tuple[int, str]:
    code = f"""
from sharpen.cli.main import main
sys.exit(main({list(arguments)!r}))
"""
    with forked("-c", f"import sys\n{code}", cwd=folder) as process:
        said = "".join(process.communicate())
    return process.returncode, said


def test_plugins_register_names_and_train(tmp_path: Path, trinity_yaml: Path):
    """A file in Trinity's layout, and a plugin that imports Trinity: neither is edited."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "mine.py").write_text(USERS)
    (plugins / "beside.py").write_text("from trinity.plugins.mine import OneCall\nassert OneCall\n")
    (plugins / "__init__.py").write_text("raise RuntimeError('not a plugin')\n")
    code, said = sharpen(tmp_path, "explain", "--config", str(trinity_yaml))
    assert (code, "there is no workflow 'one_call'" in said) == (2, True)
    code, said = sharpen(tmp_path, "run", "--config", str(trinity_yaml), "--plugin-dir", str(plugins))
    assert code == 0, said
    assert json.loads((tmp_path / "runs/p/n/summary.json").read_text())["steps"] == 2
    code, said = sharpen(tmp_path, "explain", "--config", str(trinity_yaml), "--plugin-dir", str(tmp_path / "nowhere"))
    assert (code, f"--plugin-dir {tmp_path / 'nowhere'}: there is no such folder" in said) == (2, True)


def test_a_module_that_the_file_names_imports_trinity(tmp_path: Path, trinity_yaml: Path):
    """In the root of a clone of Trinity-RFT, whose folder `trinity` is no installation."""
    package = tmp_path / "examples" / "mine"
    package.mkdir(parents=True)
    (package / "flow.py").write_text(USERS)
    clone = tmp_path / "trinity"
    clone.mkdir()
    (clone / "__init__.py").write_text("raise RuntimeError('needs vLLM')\n")
    text = trinity_yaml.read_text().replace("one_call", "examples.mine.flow.OneCall")
    trinity_yaml.write_text(text)
    code, said = sharpen(tmp_path, "check", "--config", str(trinity_yaml), "--tasks", "2")
    assert code in (0, 1), said
    assert "task     spread  rewards" in said


# Helpers


def test_helpers():
    assert get_logger("users").name == "sharpen.workflow.users"
    assert get_logger().name == "sharpen.workflow"
    assert remove_right_units("5\\text{ cm}") == "5"
    fractions = {"\\frac12": "\\frac{1}{2}", "\\frac1{72}": "\\frac{1}{72}", "\\frac{3}{4}": "\\frac{3}{4}", "x": "x"}
    assert {text: fix_fracs(text) for text in fractions} == fractions
    assert match_answer("<think>\\boxed{1}</think> \\boxed{2}") == (True, "2")
    assert match_answer("<think>1</think> 2") == (False, " 2")
    assert grade_answer("0.5", "\\frac{1}{2}") == (True, "0.5")
    assert grade_answer(None, "1") == (False, None)
    assert verify_math_answer("The answer is 42.", "6*7 #### 42")[0] == 1.0
    assert verify_math_answer("dunno", "42") == (
        0.0,
        {"parsed_prediction": None, "ground_truth": "42", "is_correct": False},
    )


def test_parents_of_modules_are_modules():
    assert all(module.rpartition(".")[0] in {"", *MODULES} for module in MODULES)
