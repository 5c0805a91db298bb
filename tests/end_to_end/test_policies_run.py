"""A frozen opponent: the original model answers one agent beside the trained one, in the same run, and never trains."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.load import resolve
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups
from sharpen.run.evaluation import evaluate
from sharpen.types import Call, CallStatus

VOWELS = "aeiou"


async def ask(model: Any, text: str) -> str:
    messages: Any = [{"role": "user", "content": text}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
    return reply.choices[0].message.content or ""


def vowels(text: str) -> float:
    return sum(letter in VOWELS for letter in text) / 8


async def more_vowels_than_the_rival(task: Any, model: Any) -> WorkflowOutput:
    """A game of two: who says more vowels. Both are asked the same, and the rival goes on from what was said."""
    assert model.policies == {"rival"}
    rival = model.named("rival")
    mine, theirs = await ask(model, task["question"]), await ask(rival, task["question"])
    await ask(rival, f"{task['question']} {mine}")
    return WorkflowOutput(reward=vowels(mine) - vowels(theirs))


def run(folder: Path, model: Path, dataset: Path, workflow: Any = more_vowels_than_the_rival, **settings: Any) -> Any:
    return tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=settings.pop("steps", 6)),
        eval_dataset=DatasetConfig(path=str(dataset), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type=settings.pop("algorithm", "grpo"), group_size=8, batch_size=4, learning_rate=5e-3
        ),
        settings={
            "checkpoint_root_dir": str(folder),
            "project": "p",
            "name": "n",
            "check.enabled": False,
            "trainer.lora.rank": 8,
            "policies.rival.follow": "original",
            "certificate.retrain": "off",
            **settings,
        },
    )


def calls_of(run_dir: Path, agent: str) -> list[Call]:
    groups = read_groups(run_dir / "run.db")
    return [call for group in groups for rollout in group.rollouts for call in rollout.calls if call.agent == agent]


@pytest.fixture(scope="module")
def loud_model_dir(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path) -> Path:
    """The toy model with a larger last norm: beneath frozen embeddings its logits could otherwise not leave zero."""
    folder = tmp_path_factory.mktemp("loud") / "model"
    shutil.copytree(toy_model_dir, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(8)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, loud_model_dir: Path, toy_dataset: Path) -> Any:
    return run(tmp_path_factory.mktemp("policies"), loud_model_dir, toy_dataset)


def test_the_rival_stays_the_original_while_the_other_learns(result: Any) -> None:
    """The rewards are of games against the original, so the verdict is too: it gains on an opponent that stays."""
    mine, rivals = calls_of(result.run_dir, ""), calls_of(result.run_dir, "rival")
    assert {call.status for call in mine} == {CallStatus.USED}
    assert {int(version) for call in mine for version in call.versions_S} == set(range(6))
    assert len(rivals) == 2 * len(mine)
    assert {call.status for call in rivals} == {CallStatus.LEFT_OUT}
    assert not any(call.versions_S.any() for call in rivals)
    before, after = (np.mean([*one.sampled.values()]) for one in (result.rewards_before, result.rewards_after))
    assert after > before
    with sqlite3.connect(result.run_dir / "run.db") as journal:
        trained = {*journal.execute("SELECT DISTINCT call FROM trained")}
    assert trained == {(0,)}


def test_it_is_certified_with_the_rivals_tokens_scored_by_the_original(result: Any) -> None:
    """Red when the rival is answered by the trained weights: its tokens then have other logprobs than recorded for
    version 0."""
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    assert {check.name: check.broken for check in certificate.checks}["policies"] == 0
    assert {check.name: check.checked for check in certificate.checks}["policies"] == len(
        calls_of(result.run_dir, "rival")
    )


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory, loud_model_dir: Path, toy_dataset: Path) -> Any:
    """Five steps against a snapshot that is renewed every two versions, the last of them in a session of its own."""
    folder = tmp_path_factory.mktemp("snapshots")
    follows = {"policies.rival.follow": "trained", "policies.rival.every": 2}
    saved = {"algorithm.save_interval_steps": 1, "trainer.keep_checkpoints": 9}
    for steps in (4, 5):
        options = {**follows, **saved, "evaluation.max_tasks": 2}
        result = run(folder, loud_model_dir, toy_dataset, steps=steps, **options)
    return result


def test_a_snapshot_answers_as_the_trained_policy_was_and_a_resumed_run_has_it(continued: Any) -> None:
    """Beside the versions 0 to 4. Red when a checkpoint does not hold the snapshot: the fifth step is then against the
    original."""
    groups = read_groups(continued.run_dir / "run.db")
    answered = {
        (group.version, int(version))
        for group in groups
        for rollout in group.rollouts
        for call in rollout.calls
        if call.agent == "rival"
        for version in call.versions_S
    }
    assert sorted(answered) == [(0, 0), (1, 0), (2, 0), (3, 2), (4, 2)]
    assert {call.status for call in calls_of(continued.run_dir, "rival")} == {CallStatus.LEFT_OUT}


def test_a_snapshots_tokens_are_scored_again_and_evaluations_are_against_the_original(continued: Any) -> None:
    """Red when the snapshot has other weights than those of its version, and when evaluations are against it."""
    certificate = certify(continued.run_dir)
    assert certificate.holds, certificate.problems
    assert not any("no checkpoint" in one for one in certificate.not_recomputed)


async def rewards_the_rival(task: Any, model: Any) -> WorkflowOutput:
    await ask(model.named("rival"), task["question"])
    return WorkflowOutput(reward=1.0, call_rewards={"rival": 1.0})


async def trains_the_rival(task: Any, model: Any) -> WorkflowOutput:
    await ask(model.named("rival"), task["question"])
    return WorkflowOutput(reward=1.0, train=["rival"])


@pytest.mark.parametrize("workflow", [rewards_the_rival, trains_the_rival])
def test_a_workflow_that_would_train_the_rival_stops_the_run(
    tmp_path: Path, loud_model_dir: Path, toy_dataset: Path, workflow: Any
) -> None:
    with pytest.raises(ConfigError, match="call_rewards or train names 'rival', an agent whose policy does not train"):
        run(tmp_path, loud_model_dir, toy_dataset, workflow)


def test_what_has_one_policy_refuses_them(toy_dataset: Path) -> None:
    """Red when an endpoint answers the rival too: it would be evaluated against itself."""
    model = {"model_path": "m", "max_model_len": 64}
    sections = {"train_dataset": DatasetConfig(path=str(toy_dataset)), "model": model}
    config = resolve(None, {"policies.rival.follow": "original", "trainer.lora.rank": 8}, sections)
    with pytest.raises(ConfigError, match="policies has rival, but this is an evaluation by itself"):
        evaluate(config, more_vowels_than_the_rival, None, endpoint={"base_url": "http://127.0.0.1:9"})


SNAPSHOT = {"policies.rival.follow": "trained", "policies.rival.every": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"policies.rival.every": 2}, "follow: original has none; got follow: original, every: 2"),
    ({"policies.rival.follow": "trained"}, "follow: trained needs every"),
    ({**SNAPSHOT, "trainer.epochs": 2}, "follow: trained, but trainer.epochs and .* make several versions"),
    ({**SNAPSHOT, "sync.offset": 1}, "follow: trained, but sync lets rollouts run ahead"),
    ({**SNAPSHOT, "algorithm": "remax"}, "remax compares with greedy rollouts"),
    ({"trainer.lora": None}, "policies has rival, .* trainer.lora is not set"),
    ({"trainer.lora.base": "shared"}, "trainer.lora.base is 'shared', which leaves no original"),
    ({"trainer.num_processes": 2}, "must be in one process"),
    ({"policies.the rival.follow": "original"}, "an agent's name is"),
]


@pytest.mark.parametrize(("settings", "told"), REFUSED)
def test_what_cannot_be_served_beside_is_refused(
    tmp_path: Path, loud_model_dir: Path, toy_dataset: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        run(tmp_path, loud_model_dir, toy_dataset, **settings)
