"""M2PO in a step: the tokens left out of an update are those that plain transformers finds, however it is split."""

import numpy as np
import pytest
import torch
from trainer_toys import Batch, hf_logprobs, keeping_gradients, make_experiences, make_model, plain_copy, record

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.trainer import Trainer

THRESHOLD = 1e-3


def make_trainer(module, max_tokens=80, **config):
    return Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=resolve("m2po", LossConfig(kl="none", policy_loss_args={"threshold": THRESHOLD}), 8),
        config=TrainerConfig(max_tokens_per_micro_batch=max_tokens, eps=1e-3, **config),
        learning_rate=1e-2,
        planned_updates=10,
        tolerance=Tolerance(),
    )


def moved(module):
    """Move the weights a little, as if the engine had sampled with older ones."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.01 * torch.sin(torch.arange(parameter.numel(), dtype=parameter.dtype)).view_as(parameter)
    return module


def kept_tokens(twin, experiences):
    """For each sequence which loss tokens are trained, and the moments: plain loops over the whole update."""
    pushed = []
    for number, one in enumerate(experiences):
        ratios = hf_logprobs(twin, one).detach().numpy() - one.logprobs_T[one.loss_mask_T]
        for token, (ratio, advantage) in enumerate(zip(ratios, one.advantages_T[one.loss_mask_T], strict=True)):
            if (advantage > 0 and ratio > 0) or (advantage < 0 and ratio < 0):
                pushed.append((float(ratio) ** 2, number, token))
    kept = [np.ones(int(one.loss_mask_T.sum()), bool) for one in experiences]
    total = 0.0
    for count, (moment, number, token) in enumerate(sorted(pushed), start=1):
        total += moment
        kept[number][token] = total / count <= THRESHOLD
    return kept, sum(moment for moment, _, _ in pushed) / len(pushed), len(pushed)


@pytest.mark.parametrize("max_tokens", [30, 80, 10_000])
def test_the_gradient_is_that_of_the_kept_tokens_however_the_update_is_split(max_tokens):
    """Red when `mask_tokens` decides for each pack by itself."""
    module = make_model("qwen3")
    experiences = record(plain_copy(module), make_experiences())
    moved(module)
    twin = plain_copy(module)
    kept, before, num_pushed = kept_tokens(twin, experiences)
    num_out, num_tokens = sum((~one).sum() for one in kept), sum(len(one) for one in kept)
    assert 3 < num_out < num_tokens / 2
    for one, keeps_E in zip(experiences, kept, strict=True):
        factor = (one.weights_T * one.advantages_T)[one.loss_mask_T] * keeps_E
        ratio_E = (hf_logprobs(twin, one) - torch.from_numpy(one.logprobs_T[one.loss_mask_T])).exp()
        (-torch.from_numpy(factor).double() * ratio_E).sum().backward()
    trainer = make_trainer(module, max_tokens)
    with keeping_gradients(trainer.policy) as found:
        metrics = trainer.train_step([Batch(experiences=tuple(experiences))])
    values = metrics.values
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-7, rtol=1e-5)
    assert values["m2_masked_fraction"] == pytest.approx(num_out / num_tokens)
    assert values["m2_trust_region_fraction"] == pytest.approx(num_pushed / num_tokens)
    assert values["m2_before"] == pytest.approx(before, rel=1e-5)
    assert values["m2_after"] <= THRESHOLD < values["m2_before"]
    said = {(one.rollout_id, one.call): one.clipped_S for one in metrics.entropies}
    for one, keeps_E in zip(experiences, kept, strict=True):
        calls = sorted(call for rollout_id, call in said if rollout_id == one.rollout_id)
        np.testing.assert_array_equal(np.concatenate([said[one.rollout_id, call] for call in calls]), ~keeps_E)


def test_every_update_is_masked_anew_by_the_weights_before_it():
    """Two epochs from the weights that sampled: nothing is left out of the first, and what the second leaves out has
    its advantage again in the next. Red when the packs of the step are changed themselves."""
    module = make_model("qwen3")
    experiences = record(plain_copy(module), make_experiences())
    trainer = make_trainer(module, epochs=2)
    works = trainer._loss.begin([Batch(experiences=tuple(experiences))], version=0, step=1, probe=())
    before = [part.pack.advantages_E.copy() for part in works[0].parts]
    values = trainer.train_step([Batch(experiences=tuple(experiences))], step=1).values
    assert 0 < values["m2_masked_fraction"] < 0.5
    first, second = (update.masked for update in trainer._loss._updates)
    assert first["m2_masked_fraction"] == 0.0 < second["m2_masked_fraction"]
    moved(trainer.policy.module)
    trainer._loss.backward(works[0], 2)
    for part, advantages_E in zip(works[0].parts, before, strict=True):
        np.testing.assert_array_equal(part.pack.advantages_E, advantages_E)
