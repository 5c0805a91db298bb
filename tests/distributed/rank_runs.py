"""Runs on a toy model, to be compared with each other, and workflows that disturb them."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from group_toys import ranks_of

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune

BATCH_SIZE, GROUP_SIZE = 3, 4


async def letters(task, model):
    """One call; the reward is the share of the letter 'e'."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)


def disturbing(act, step: int):
    """A workflow that does `act` when `step` begins to roll out, and goes on."""
    calls: Counter[str] = Counter()

    async def disturbs(task, model):
        calls["all"] += 1
        if calls["all"] == (step - 1) * BATCH_SIZE * GROUP_SIZE + 1:
            act()
        return await letters(task, model)

    return disturbs


interrupted_here = disturbing(lambda: os.kill(os.getpid(), signal.SIGINT), 3)
interrupted_by_terminal = disturbing(lambda: os.killpg(0, signal.SIGINT), 3)
stopped_with_its_ranks = disturbing(lambda: stop_all(signal.SIGHUP, signal.SIGTERM), 3)


def stop_all(*signals: int) -> None:
    """What the end of a job does: the same to every process."""
    for process in (*ranks_of(os.getpid()), os.getpid()):
        for number in signals:
            os.kill(process, number)


def run(
    folder: Path, model: Path, dataset: Path, processes: int, *, steps=4, workflow=letters, settings=None, **options
):
    return tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=str(dataset), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo",
            group_size=GROUP_SIZE,
            batch_size=BATCH_SIZE,
            learning_rate=1e-3,
            save_interval_steps=2,
            eval_interval_steps=100,
        ),
        settings={
            "checkpoint_root_dir": str(folder),
            "deterministic": True,
            "check.enabled": False,
            "evaluation.before_and_after": False,
            "rollout.failure_reward": 0.0,
            "trainer.num_processes": processes,
            "trainer.num_minibatches": 2,
            "trainer.eps": 1e-3,
            **(settings or {}),
        },
        **options,
    )


def rows(run_dir: Path) -> dict[int, dict]:
    """The last line of each step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in lines if "trainer/loss" in row}


def assert_same_losses(one: Path, many: Path) -> None:
    first, second = rows(one), rows(many)
    assert first.keys() == second.keys()
    for step, row in first.items():
        for name in {"trainer/loss", "trainer/grad_norm", "tokens/sampled", "reward/mean"} & row.keys():
            assert second[step][name] == pytest.approx(row[name], rel=1e-6, abs=1e-6), (step, name)
