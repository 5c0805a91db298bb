"""Several agents in one workflow: names from their keys to the record, rewards and training of each."""

import shutil
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.main import main
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups
from sharpen.types import CallStatus, Group


async def ask(model: Any, text: str, name: str | None = None) -> str:
    messages: Any = [{"role": "user", "content": text}]
    reply = await model.client.chat.completions.create(model=name or model.name, messages=messages, max_tokens=4)
    return reply.choices[0].message.content or ""


async def plan_and_code(task: Any, model: Any) -> WorkflowOutput:
    """The planner asks twice, once over HTTP; the coder once; an unnamed agent once, and a side call."""
    planner, coder = model.named("planner"), model.named("coder")
    plan = await ask(planner, task["question"])
    again: Any = [{"role": "user", "content": f"again {task['question']}"}]
    async with openai.AsyncOpenAI(base_url=planner.base_url, api_key=planner.api_key) as client:
        await client.chat.completions.create(model=model.name, messages=again, max_tokens=4)
    code = await ask(coder, f"code {task['question']}")
    answer = await ask(model, f"say {task['question']}")
    await ask(model, "a title", name="toy-haiku-1")
    return WorkflowOutput(
        reward=float(len(answer)), call_rewards={"planner": len(plan) / 10, "coder": -float(len(code)), "nobody": 1.0}
    )


async def only_the_coder(task: Any, model: Any) -> WorkflowOutput:
    code = await ask(model.named("coder"), task["question"])
    await ask(model.named("planner"), task["question"])
    return WorkflowOutput(reward=float(len(code)), train=["coder"])


def run(folder: Path, model: Path, dataset: Path, workflow: Any) -> Path:
    tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), total_steps=2),
        model=TunerModelConfig(model_path=str(model), max_model_len=64),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(folder),
            "name": "n",
            "project": "p",
            "check.enabled": False,
            "evaluation.hold_out": False,
            "rollout.side_models": ["*haiku*"],
        },
    )
    return folder / "p" / "n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path, toy_dataset: Path) -> Path:
    return run(tmp_path_factory.mktemp("team"), toy_model_dir, toy_dataset, plan_and_code)


def groups_of(run_dir: Path) -> dict[str, list[Group]]:
    """The groups by their agent, "" for the tasks'."""
    found = defaultdict(list)
    for group in read_groups(run_dir / "run.db"):
        found[group.id.partition("~")[2]].append(group)
    return found


def test_each_agent_is_compared_with_itself(run_dir: Path) -> None:
    found = groups_of(run_dir)
    assert {name: len(groups) for name, groups in found.items()} == {"": 4, "planner": 4, "coder": 4}
    advantages: dict[str, list[float]] = defaultdict(list)
    with sqlite3.connect(run_dir / "run.db") as journal:
        for rollout_id, advantage in journal.execute("SELECT rollout_id, advantage FROM trained"):
            advantages[rollout_id].append(advantage)
    for name, groups in found.items():
        for group in groups:
            rewards = np.array([rollout.reward for rollout in group.rollouts])
            for rollout, reward in zip(group.rollouts, rewards, strict=True):
                used = [call for call in rollout.calls if call.status == CallStatus.USED]
                assert {call.agent for call in used} == {name}
                assert len(used) == (2 if name == "planner" else 1)
                for advantage in advantages.get(rollout.id, ()):
                    assert advantage == pytest.approx(
                        (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), rel=1e-3
                    )
    assert advantages


def test_calls_to_a_side_model_are_recorded_and_left_out(run_dir: Path) -> None:
    """Red when `rollout.side_models` is not looked at."""
    for group in groups_of(run_dir)[""]:
        for rollout in group.rollouts:
            assert [(call.status, call.model) for call in rollout.calls] == [
                (CallStatus.USED, ""),
                (CallStatus.LEFT_OUT, "toy-haiku-1"),
            ]


def test_it_is_certified_and_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certify(run_dir).holds
    assert main(["show", str(run_dir), "--rollout", groups_of(run_dir)["planner"][0].rollouts[0].id]) == 0
    assert "agent planner" in " ".join(capsys.readouterr().out.split())


def test_train_names_the_agents_that_train(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path) -> None:
    run_dir = run(tmp_path, toy_model_dir, toy_dataset, only_the_coder)
    for group in groups_of(run_dir)[""]:
        for rollout in group.rollouts:
            assert [(call.agent, call.status) for call in rollout.calls] == [
                ("coder", CallStatus.USED),
                ("planner", CallStatus.LEFT_OUT),
            ]
    assert certify(run_dir).holds
    shutil.rmtree(run_dir)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"call_rewards": {"planner": float("nan")}}, "planner"),
    ({"train": [7]}, "call 7"),
]


@pytest.mark.parametrize(("said", "told"), BAD)
def test_what_cannot_be_meant_stops_the_run(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, said: dict[str, Any], told: str
) -> None:
    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        await ask(model.named("planner"), task["question"])
        return WorkflowOutput(reward=1.0, **said)

    with pytest.raises(ConfigError, match=told):
        run(tmp_path, toy_model_dir, toy_dataset, workflow)
