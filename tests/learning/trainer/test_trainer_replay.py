"""Tokens of older policies in a step: what their ratio is against, and what is still compared with the engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_toys import Batch, hf_logprobs, make_experiences, make_model, plain_copy, record

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ParityError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.trainer import Trainer
from sharpen.types import Experience


def make_trainer(module, loss=None):
    trainer = Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=resolve("multi_step_grpo", loss or LossConfig(kl="none"), 8),
        config=TrainerConfig(max_tokens_per_micro_batch=80),
        learning_rate=0.01,
        planned_updates=10,
    )
    trainer.version = 3
    return trainer


def at_version(experience: Experience, version: int, **changes) -> Experience:
    mask_T = experience.loss_mask_T
    return replace(experience, versions_T=np.where(mask_T, version, -1).astype(np.int32), **changes)


def stale_and_fresh(module) -> tuple[list[Experience], list[Experience]]:
    """Group g0 as an older policy sampled it (other logprobs), groups g1 and g2 as the current one did."""
    older = record(make_model("qwen3", torch.float32, seed=1), make_experiences())
    current = record(plain_copy(module), make_experiences())
    stale = [at_version(one, 1) for one in older if one.group_id == "g0"]
    return stale, [at_version(one, 3) for one in current if one.group_id != "g0"]


def num_tokens(experiences: list[Experience]) -> int:
    return sum(int(one.loss_mask_T.sum()) for one in experiences)


def flat(experiences: list[Experience]) -> list[Experience]:
    return [replace(one, advantages_T=np.zeros_like(one.advantages_T)) for one in experiences]


def test_a_replayed_tokens_ratio_is_against_the_policy_that_sampled_it():
    """Gradient -w A exp(log π - recorded) of every token, by plain transformers. Red when `_backward` takes the
    trainer's own logprobs for old ones."""
    module = make_model("qwen3", torch.float32)
    twin = plain_copy(module)
    stale, fresh = stale_and_fresh(module)
    for one in (*stale, *fresh):
        mask = one.loss_mask_T
        factor = torch.from_numpy((one.weights_T * one.advantages_T)[mask])
        ratio = torch.exp(hf_logprobs(twin, one) - torch.from_numpy(one.logprobs_T[mask]))
        (-factor * ratio).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    trainer = make_trainer(module, LossConfig(kl="none", policy_loss="importance_sampling"))
    metrics = trainer.train_step([Batch(experiences=(*fresh, *stale))])
    assert metrics.values["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics.values["ratio_max"] > 1.1


def test_only_fresh_tokens_are_compared_with_the_engine():
    module = make_model("qwen3", torch.float32)
    stale, fresh = stale_and_fresh(module)
    metrics = make_trainer(module).train_step([Batch(experiences=(*fresh, *stale))], probe=fresh[:1])
    assert metrics.values["logprob_gap_tokens"] == num_tokens(fresh)
    assert metrics.values["logprob_gap_max"] < 1e-4


@pytest.mark.parametrize("dropped", [True, False])
def test_the_comparison_holds_where_everything_fresh_is_flat(dropped):
    """Whether flat groups were dropped (dapo) or carry no advantage (grpo), one of them is scored, once, and a wrong
    record stops the step before anything changes. Red when `train_step` does not call `_compare`."""
    module = make_model("qwen3", torch.float32)
    stale, fresh = stale_and_fresh(module)
    batch = Batch(experiences=tuple(stale) if dropped else (*flat(fresh), *stale))
    probe = [one for one in fresh if one.group_id == "g1"]
    trainer = make_trainer(module)
    wrong = replace(probe[0], logprobs_T=probe[0].logprobs_T + np.where(probe[0].loss_mask_T, np.float32(0.01), 0))
    before = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    with pytest.raises(ParityError, match=r"policy version 3.*rollout g1/0"):
        trainer.train_step([batch], probe=[wrong, *probe[1:]])
    assert trainer.version == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_tensors().items())
    metrics = trainer.train_step([batch], probe=probe)
    assert metrics.values["logprob_gap_tokens"] == num_tokens(probe)
    assert metrics.trained_tokens == num_tokens(stale)
    assert trainer.version == 4
