"""What a run takes of an environment, whoever wrote it: settings, tasks, functions, and what is said of wrong ones."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sharpen import AlgorithmConfig, EnvironmentConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.agent.environments import opening
from sharpen.agent.environments.opening import closing_environment, functions_of, opened, tasks_of
from sharpen.cli.main import main
from sharpen.config.load import resolve
from sharpen.config.public import ENVIRONMENT, DatasetConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.testing import check_environment

MODEL = {"model_path": "some/model", "max_model_len": 64}
SOURCE = '''
from sharpen import JudgeOutput, WorkflowOutput

class Echo:
    """Five words to repeat; `args`: what is to go wrong."""

    def __init__(self, config):
        self.args, self.closed = dict(config.args), 0
        if self.args.get("broken"):
            raise RuntimeError("no display")

    def tasks(self, split):
        words = {"train": ["a", "b", "c"], "test": ["d", "e"]}[split]
        return [] if self.args.get("empty") else [{"word": word} for word in words]

    async def workflow(self, task, model):
        messages = [{"role": "user", "content": task["word"]}]
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
        return WorkflowOutput(response=reply.choices[0].message.content)

    async def judge(self, task, response):
        return JudgeOutput(reward=self.args.get("reward", float(len(set(response or "")))))

    def close(self):
        self.closed += 1
'''


@pytest.fixture
def echo(tmp_path: Path) -> str:
    path = tmp_path / "echo_environment.py"
    path.write_text(SOURCE)
    return f"{path}:Echo"


def config_of(environment: Any, **more: Any) -> Any:
    return resolve({"environment": environment, "model": MODEL, **more}).config


def test_the_environment_is_the_dataset_where_none_is_named() -> None:
    """Red without the rule: `train_dataset` would be missing, and a tenth of the training tasks held out."""
    config = config_of({"type": "reasoning-gym", "id": "chain_sum"}, train_dataset={"total_steps": 7})
    assert (config.train_dataset.path, config.train_dataset.split) == (ENVIRONMENT, "train")
    assert config.train_dataset.total_steps == 7
    assert config.eval_dataset == DatasetConfig(path=ENVIRONMENT, split="test")
    own = config_of(
        {"type": "reasoning-gym"}, train_dataset={"path": "a.jsonl"}, eval_dataset={"path": "b.jsonl", "split": "x"}
    )
    assert (own.train_dataset.path, own.eval_dataset.path, own.eval_dataset.split) == ("a.jsonl", "b.jsonl", "x")
    assert config_of({"type": "reasoning-gym"}, evaluation={"hold_out": False}).eval_dataset is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"type": "reasoning_gym"}, "did you mean 'reasoning-gym'?"),
        ({"id": "chain_sum"}, "'environment.type' is missing"),
        ({"type": "reasoning-gym", "tasks": 3}, "'environment.tasks' is not a setting"),
        ({"type": "reasoning-gym", "train_tasks": 0}, "must be at least 1"),
    ],
)
def test_a_wrong_section_is_one_sentence(environment: Any, said: str) -> None:
    with pytest.raises(ConfigError, match="environment") as caught:
        config_of(environment)
    assert said in str(caught.value)


def test_without_an_environment_a_dataset_is_still_missing() -> None:
    with pytest.raises(ConfigError, match="'train_dataset' is missing"):
        resolve({"model": MODEL})


def test_what_a_run_takes_of_it(echo: str) -> None:
    """Tasks with ids, workflow and judge; what the user gives comes first."""
    config = EnvironmentConfig(type=echo)
    tasks = tasks_of(DatasetConfig(path=ENVIRONMENT), config)
    assert [(task.id, task.row) for task in tasks] == [(f"train/{i}", {"word": w}) for i, w in enumerate("abc")]
    assert [task.id for task in tasks_of(DatasetConfig(path=ENVIRONMENT, split="test"), config)] == ["test/0", "test/1"]
    workflow, judge = functions_of(config, None, None)
    assert judge is not None
    assert asyncio.run(judge(task={"word": "a"}, response="aab")).reward == 2.0

    async def mine(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response="")

    assert functions_of(config, mine, None)[0] is mine
    assert functions_of(config, mine, mine) == (mine, mine)
    assert functions_of(None, mine, None) == (mine, None)
    assert callable(workflow)


def test_functions_travel_without_the_environment(echo: str) -> None:
    """A worker's process gets the settings and opens its own: red if the functions were the environment's methods."""
    config = EnvironmentConfig(type=echo)
    workflow, judge = functions_of(config, None, None)
    for function in (workflow, judge):
        there = pickle.loads(pickle.dumps(function))
        assert there.args == (config,)


def test_it_is_opened_once_and_closed_with_its_run(echo: str) -> None:
    config = EnvironmentConfig(type=echo)
    with closing_environment(config):
        environment = opened(config)
        assert opened(EnvironmentConfig(type=echo)) is environment
        assert opened(EnvironmentConfig(type=echo, seed=1)) is not environment
    assert environment.closed == 1  # type: ignore[attr-defined]
    assert opened(config) is not environment


@pytest.mark.parametrize(
    ("args", "error", "said"),
    [
        ({"broken": True}, ConfigError, "cannot be opened: RuntimeError: no display"),
        ({"empty": True}, DatasetError, "has no tasks of split 'train': it needs at least one"),
    ],
)
def test_an_environment_that_fails_says_so(echo: str, args: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        tasks_of(DatasetConfig(path=ENVIRONMENT), EnvironmentConfig(type=echo, args=args))
    assert said in str(caught.value)


def test_a_split_that_it_has_not(echo: str) -> None:
    with pytest.raises(DatasetError, match=r"split 'train' and of 'test'.*got 'dev'"):
        tasks_of(DatasetConfig(path=ENVIRONMENT, split="dev"), EnvironmentConfig(type=echo))


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError, match=r"'reasoning-gym', whose package is not installed: pip install 'reasoning-gym"
    ):
        opened(EnvironmentConfig(type="reasoning-gym", id="chain_sum"))


def test_a_run_trains_on_it_and_records_where_tasks_come_from(echo: str, tmp_path: Path, toy_model_dir: Path) -> None:
    result = tune(
        environment=EnvironmentConfig(type=echo),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64, max_tokens=4),
        algorithm=AlgorithmConfig(batch_size=2, group_size=2),
        settings={"checkpoint_root_dir": str(tmp_path), "name": "run", "train_dataset.total_steps": 1},
    )
    recorded = json.loads((result.run_dir / "resolved.json").read_text())
    assert recorded["environment.type"] == {"value": echo, "origin": "argument"}
    assert recorded["identity.train_dataset"]["value"]["rows"] == 3
    assert recorded["identity.held_out"]["value"]["rows"] == 2
    assert recorded["identity.environment.type"]["value"]["bytes"] == len(SOURCE)
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["before"]["sampled"]["num_tasks"] == 2
    assert not [key for key in opening._opened if echo in key], "closed with the run"


def test_a_reward_that_is_no_number_is_the_judges_failure(echo: str, tmp_path: Path, toy_model_dir: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        json.dumps(
            {
                "environment": {"type": echo, "args": {"reward": "much"}},
                "model": {"model_path": str(toy_model_dir), "max_model_len": 64, "max_tokens": 4},
                "train_dataset": {"total_steps": 1},
            }
        )
    )
    assert main(["check", "--config", str(file)]) == 1


def test_rows_do_not_train_on_an_environment(echo: str, tmp_path: Path, toy_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_dataset.path is missing: 'sft' learns from rows"):
        tune(
            environment=EnvironmentConfig(type=echo),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
            algorithm=AlgorithmConfig(algorithm_type="sft"),
        )


class Small:
    """A right environment, of which each fault below spoils a part."""

    judge: Any = None

    def __init__(self, config: EnvironmentConfig) -> None:
        pass

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"n": {"train": 1, "test": 2}[split]}]

    async def workflow(self, task: Any, model: Any) -> WorkflowOutput:
        await model.client.chat.completions.create(model=model.name, messages=[{"role": "user", "content": "?"}])
        return WorkflowOutput(reward=1)

    def close(self) -> None:
        pass


async def _asks_nothing(self: Any, task: Any, model: Any) -> WorkflowOutput:
    return WorkflowOutput(reward=1)


async def _gives_nothing(self: Any, task: Any, model: Any) -> Any:
    await Small.workflow(self, task, model)
    return SimpleNamespace(reward=None)


async def _gives_nan(self: Any, task: Any, model: Any) -> Any:
    await Small.workflow(self, task, model)
    return float("nan")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"tasks": lambda self, split: [{"n": 1}]}, "in both splits"),
        ({"tasks": lambda self, split: []}, "no tasks"),
        ({"tasks": lambda self, split: [{"n": object()}]}, "JSON"),
        ({"tasks": lambda self, split: [{"n": id(self), "s": split}]}, "has other tasks"),
        ({"workflow": _asks_nothing}, "asked the model nothing"),
        ({"workflow": _gives_nothing}, "gave no reward"),
        ({"workflow": _gives_nan}, "not a finite number"),
    ],
)
def test_the_contract_test_sees_each_fault(fault: dict[str, Any], said: str) -> None:
    config = EnvironmentConfig(type="tests:Small")
    check_environment(Small, config)
    with pytest.raises(AssertionError, match=said):
        check_environment(type("Spoiled", (Small,), fault), config)
