"""A planted agent that fails on one of two answers, through `tune()`: what is retried, counted, and learnt."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, UnusableAnswerError, WorkflowOutput, tune
from sharpen.learning.experience.reading import read_groups, read_trained
from sharpen.types import Outcome


async def ask(task, model):
    """Whether the answer has an even number of characters: one of two answers, about equally likely."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], stop=list("aeio")
    )
    assert reply.choices[0].finish_reason == "stop"  # none is cut: that would be another cause
    return len(reply.choices[0].message.content or "") % 2 == 0


async def breaks(task, model):
    if await ask(task, model):
        raise KeyError("x")
    return WorkflowOutput(reward=1.0)


async def calls_it_unusable(task, model):
    if await ask(task, model):
        raise UnusableAnswerError("even")
    return WorkflowOutput(reward=1.0)


def run(workflow, folder, toy_model_dir, toy_dataset, **settings):
    return tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=256, max_tokens=160),
        algorithm=AlgorithmConfig(algorithm_type="multi_step_grpo", group_size=8, batch_size=4, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(folder),
            "check.enabled": False,
            "evaluation.before_and_after": False,
            "evaluation.hold_out": False,
            **settings,
        },
    )


def test_trap_33_an_agent_that_fails_on_one_of_two_answers_learns_neither_way_from_the_retry(
    tmp_path, toy_model_dir, toy_dataset, capsys
):
    """Red when a retry draws anew: nobody is excluded then, the display says so, and the failures never show."""
    result = run(breaks, tmp_path, toy_model_dir, toy_dataset, **{"rollout.max_excluded_share": 1.0})
    groups = list(read_groups(result.run_dir / "run.db"))
    failed = [one for group in groups for one in group.rollouts if one.outcome == Outcome.WORKFLOW_ERROR]
    assert 12 < len(failed) < 52
    assert sum(len(group.attempts) for group in groups) == 2 * len(failed)
    for line in (result.run_dir / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert metrics["rollout/excluded_share"] > 0.1
        assert metrics["rollout/replaced_share"] == 0.0
    assert read_trained(result.run_dir / "run.db") == [] or all(
        call.advantage == 0.0 for call in read_trained(result.run_dir / "run.db")
    )
    shown = capsys.readouterr().out
    assert "if the model's answer caused it, name it in rollout.model_exceptions" in shown


def test_an_unusable_answer_is_learnt_from_in_a_folder_that_is_gone(tmp_path, toy_model_dir, toy_dataset):
    """`failure_reward` is the lesson, and nothing is drawn twice. The workflow loses the working folder meanwhile, and
    all of the paths were relative to it."""
    shutil.copytree(toy_model_dir, tmp_path / "work" / "model")
    before = Path.cwd()
    os.chdir(tmp_path / "work")

    async def workflow(task, model):
        lost = tmp_path / "lost"
        lost.mkdir(exist_ok=True)
        os.chdir(lost)
        lost.rmdir()
        return await calls_it_unusable(task, model)

    try:
        result = run(workflow, "runs", Path("model"), toy_dataset, **{"rollout.failure_reward": 0.0})
    finally:
        os.chdir(before)
    groups = list(read_groups(result.run_dir / "run.db"))
    assert all(group.attempts == () for group in groups)
    rewards = {one.id: one.reward for group in groups for one in group.rollouts}
    assert {0.0, 1.0} == set(rewards.values())
    for call in read_trained(result.run_dir / "run.db"):
        assert call.advantage > 0 if rewards[call.rollout_id] else call.advantage < 0
    assert (tmp_path / "work" / "runs").is_dir()
