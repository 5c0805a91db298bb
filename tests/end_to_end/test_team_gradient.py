"""Of several agents' calls only those train that are to: the weights are those of a run without the others, bit for
bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.main import main
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_trained
from sharpen.types import CallStatus

Weights = dict[str, torch.Tensor]


async def ask(model: Any, text: str, max_tokens: int) -> str:
    messages: Any = [{"role": "user", "content": text}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=max_tokens)
    return reply.choices[0].message.content or ""


def worth(text: str) -> float:
    """A reward that differs where the texts do, so that no group is flat."""
    return float(sum(map(ord, text)) % 97)


def workflow_of(asks_planner: bool, **said: Any) -> Any:
    """A coder, and a planner whose reward has nothing to do with the coder's."""

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        code = await ask(model.named("coder"), task["question"], 5)
        plan = await ask(model.named("planner"), f"a plan for {task['question']}", 3) if asks_planner else ""
        team = {name: value(plan) if callable(value) else value for name, value in said.items()}
        return WorkflowOutput(reward=worth(code), **team)

    return workflow


def run(folder: Path, model: Path, dataset: Path, workflow: Any) -> Path:
    result = tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), total_steps=1),
        model=TunerModelConfig(model_path=str(model), max_model_len=64),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=1, learning_rate=1e-2),
        settings={
            "checkpoint_root_dir": str(folder),
            "deterministic": True,
            "check.enabled": False,
            "evaluation": {"hold_out": False, "before_and_after": False},
        },
    )
    return result.run_dir


def weights_of(run_dir: Path) -> Weights:
    return load_file(run_dir / "latest" / "model.safetensors")


def the_same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path, toy_dataset: Path) -> Weights:
    """The weights after a step in which the coder alone was asked."""
    folder = tmp_path_factory.mktemp("alone")
    return weights_of(run(folder, toy_model_dir, toy_dataset, workflow_of(False)))


def planned(plan: str) -> dict[str, float]:
    return {"planner": worth(plan)}


TRAIN: dict[str, dict[str, Any]] = {
    "by name": {"train": ["coder"]},
    "by index": {"train": [0]},
    "beside an own reward": {"train": ["coder"], "call_rewards": planned},
}


@pytest.mark.parametrize("said", TRAIN.values(), ids=TRAIN)
def test_what_is_left_out_is_not_in_the_gradient(
    tmp_path: Path,
    toy_model_dir: Path,
    toy_dataset: Path,
    alone: Weights,
    said: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Red when the planner's calls train too, as they do without `train`."""
    run_dir = run(tmp_path, toy_model_dir, toy_dataset, workflow_of(True, **said))
    assert the_same(weights_of(run_dir), alone)
    assert certify(run_dir).holds
    rollouts = [rollout for group in read_groups(run_dir / "run.db") for rollout in group.rollouts]
    used = {(rollout.id, call.index) for rollout in rollouts for call in rollout.calls if call.agent == "coder"}
    assert {(call.rollout_id, call.call) for call in read_trained(run_dir / "run.db")} <= used
    left_out = [call for rollout in rollouts for call in rollout.calls if call.agent == "planner"]
    assert {call.status for call in left_out} == {CallStatus.LEFT_OUT}
    said_of = {call.agent: rollout.id for rollout in rollouts for call in rollout.calls}
    capsys.readouterr()
    for agent, state in (("coder", "trained"), ("planner", "no loss (left_out)")):
        assert main(["show", str(run_dir), "--rollout", said_of[agent]]) == 0
        assert re.search(rf", {re.escape(state)}[^:]*agent {agent}", " ".join(capsys.readouterr().out.split()))


def test_each_by_its_own_reward_moves_the_weights_for_both(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, alone: Weights
) -> None:
    run_dir = run(tmp_path, toy_model_dir, toy_dataset, workflow_of(True, call_rewards=planned))
    assert not the_same(weights_of(run_dir), alone)
    assert certify(run_dir).holds
    agents = {
        (rollout.id, call.index): call.agent
        for group in read_groups(run_dir / "run.db")
        for rollout in group.rollouts
        for call in rollout.calls
    }
    trained = {agents[one.rollout_id, one.call] for one in read_trained(run_dir / "run.db") if one.num_tokens}
    assert trained == {"coder", "planner"}
