"""Entropy clips in a step: the tokens that lose their advantage are those that plain transformers finds."""

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

ARGUMENTS = {"clipb": {"mu": 0.3}, "clipv": {"mu": 0.3, "max_frac": 0.05}}


def make_trainer(module, name, max_tokens=80):
    return Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=resolve("grpo", LossConfig(kl="none", advantage=name, advantage_args=ARGUMENTS[name]), 8),
        config=TrainerConfig(max_tokens_per_micro_batch=max_tokens, eps=1e-3),
        learning_rate=1e-3,
        planned_updates=10,
        tolerance=Tolerance(mean=None, max=1e-4),
    )


def kept_tokens(twin, experiences, name):
    """For each sequence which of its loss tokens keep their advantage, from whole distributions."""
    below, values, negative = [], [], []
    with torch.no_grad():
        for one in experiences:
            targets = np.flatnonzero(one.loss_mask_T)
            logits_TV = twin(input_ids=torch.from_numpy(one.ids_T.astype(np.int64))[None], use_cache=False).logits[0]
            logprobs_EV = (logits_TV[targets - 1] / torch.from_numpy(one.temperatures_T[targets])[:, None]).log_softmax(
                -1
            )
            p_EV = logprobs_EV.exp()
            all_EV = p_EV * (torch.distributions.Categorical(logits=logprobs_EV).entropy()[:, None] + logprobs_EV)
            sampled_E = all_EV[range(len(targets)), one.ids_T[targets].tolist()]
            values.append(sampled_E.numpy())
            below.append(((p_EV * all_EV).sum(-1) - sampled_E).numpy())
            negative.append(one.advantages_T[targets] < 0)
    everything = np.concatenate(values)
    if name == "clipb":
        below = [everything.mean() - value for value in values]
    over = ARGUMENTS[name]["mu"] * np.concatenate(below).std()
    out = np.concatenate(negative) & (np.concatenate(below) > over)
    if name == "clipv":
        most = int(0.05 * len(everything))
        worst = np.argsort(np.where(out, np.concatenate(below), -np.inf))[-most:]
        out &= np.isin(np.arange(len(out)), worst)
    return np.split(~out, np.cumsum([len(value) for value in values])[:-1])


@pytest.mark.parametrize("name", ["clipb", "clipv"])
@pytest.mark.parametrize("max_tokens", [30, 80, 10_000])
def test_trap_19_the_gradient_is_that_of_the_kept_tokens_however_the_step_is_split(name, max_tokens):
    """The same gradient from plain transformers, in fp64; what is over the bound is decided over the whole step.

    Red when `clip_by_entropy` is called for each pack by itself.
    """
    module = make_model("qwen3")
    twin = plain_copy(module)
    experiences = record(twin, make_experiences())
    kept = kept_tokens(twin, experiences, name)
    assert 0 < sum((~one).sum() for one in kept) < sum(len(one) for one in kept) / 2
    for one, keeps_E in zip(experiences, kept, strict=True):
        factor = (one.weights_T * one.advantages_T)[one.loss_mask_T] * keeps_E
        (-torch.from_numpy(factor).double() * hf_logprobs(twin, one)).sum().backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in twin.parameters()])
    trainer = make_trainer(module, name, max_tokens)
    with keeping_gradients(trainer.policy) as found:
        metrics = trainer.train_step([Batch(experiences=tuple(experiences))])
    assert metrics.values["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-7, rtol=1e-5)
    num_out, num_tokens = sum((~one).sum() for one in kept), sum(len(one) for one in kept)
    assert metrics.values["entropy_clip_fraction"] == pytest.approx(num_out / num_tokens)
    assert metrics.values["entropy_clip_fraction_negative"] > num_out / num_tokens
    assert metrics.skipped_tokens == 0
    said = {(one.rollout_id, one.call): one.clipped_S for one in metrics.entropies}
    for one, keeps_E in zip(experiences, kept, strict=True):
        calls = sorted(call for rollout_id, call in said if rollout_id == one.rollout_id)
        np.testing.assert_array_equal(np.concatenate([said[one.rollout_id, call] for call in calls]), ~keeps_E)


def test_other_advantages_cost_no_forward_pass_and_say_nothing():
    module = make_model("qwen3")
    experiences = record(plain_copy(module), make_experiences())
    trainer = Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=resolve("grpo", LossConfig(kl="none"), 8),
        config=TrainerConfig(),
        learning_rate=1e-3,
        planned_updates=1,
    )
    assert "entropy_clip_fraction" not in trainer.train_step([Batch(experiences=tuple(experiences))]).values
