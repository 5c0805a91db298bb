"""A run whose engine draws tokens from another distribution, or with other noise, than its logprobs say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sharpen import WorkflowOutput
from sharpen.config.load import resolve
from sharpen.engine.embedded.batch import StepBatch
from sharpen.engine.embedded.sampling import SampledRows
from sharpen.run.assembly import open_loop

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Ids (R) from a log-distribution (RV) and uniform numbers (R)."""


def peaked(model: Path, folder: Path) -> Path:
    """The model with a larger last norm: its distributions are as uneven as a language model's."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder)
    made = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        made.model.norm.weight.mul_(8)
    made.save_pretrained(folder)
    return folder


async def counts_letters(task, model):
    """One call; the reward is the share of the letter 'e' in the answer."""
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=48)
    text = reply.choices[0].message.content or ""
    return WorkflowOutput(reward=text.count("e") / 48)


def by_inverse(log_distribution_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Draw as the engine does."""
    cdf_RV = log_distribution_RV.double().exp().cumsum(dim=-1)
    ids_R = torch.searchsorted(cdf_RV, (uniform_R * cdf_RV[:, -1])[:, None], right=True).squeeze(1)
    return ids_R.clamp(max=cdf_RV.shape[1] - 1)


def train(
    folder: Path,
    model: Path,
    dataset: Path,
    draw: Draw | None,
    steps: int = 3,
    workflow: Any = counts_letters,
    **settings: Any,
) -> Path:
    """Train steps of 32 rollouts. `draw` draws in the engine's place, and its logprobs stay those of the engine's own
    distribution."""
    values = {
        "train_dataset.path": str(dataset),
        "train_dataset.split": "train",
        "train_dataset.total_steps": steps,
        "model.model_path": str(model),
        "model.max_model_len": 256,
        "model.max_tokens": 48,
        "algorithm.algorithm_type": "grpo",
        "algorithm.batch_size": 4,
        "algorithm.group_size": 8,
        "algorithm.learning_rate": 1e-3,
        "checkpoint_root_dir": str(folder),
        "evaluation.before_and_after": False,
        "check.enabled": False,
        "rollout.failure_reward": 0.0,
    }
    with open_loop(resolve(None, values | settings, {}), workflow, None) as (loop, _):
        if draw is not None:
            plant(loop.serving.engine._stepper, draw)
        loop.run()
        return loop.run_dir


def plant(stepper: Any, draw: Draw) -> None:
    """Draw the tokens of a stepper's rows by `draw`."""
    run = stepper._run

    def faulty(batch: StepBatch) -> SampledRows | None:
        rows = run(batch)
        if rows is None:
            return None
        ids_R = draw(rows.log_distribution_RV, stepper._sampling_rows(batch.slots_R).uniform_R)
        logprobs_R = rows.log_distribution_RV.gather(1, ids_R[:, None]).squeeze(1)
        return replace(rows, ids_R=ids_R, logprobs_R=logprobs_R)

    stepper._run = faulty
