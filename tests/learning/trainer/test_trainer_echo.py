"""ECHO: the gradient of what the environment answered, in the pass of the other tokens, against transformers' own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from trainer_toys import Batch, keeping_gradients, make_experiences, make_model, plain_copy, record

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.supervised import resolve_supervised
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.trainer import Trainer

WEIGHT = 0.25


def answered(experiences):
    """All that stands between two calls of a sequence is the environment's."""
    return [
        replace(one, shown_T=~one.loss_mask_T & (np.arange(len(one.ids_T)) > np.argmax(one.loss_mask_T)))
        for one in experiences
    ]


def gradients_of(model, experiences, *, max_tokens=500, **loss):
    policy = TrainedModel(make_model("qwen3", torch.float32), compute_dtype=torch.float32)
    policy.module.load_state_dict(model.state_dict())
    trainer = Trainer(
        policy,
        algorithm=resolve("grpo", LossConfig(kl="none", **loss), 4),
        config=TrainerConfig(max_tokens_per_micro_batch=max_tokens),
        learning_rate=1e-3,
        planned_updates=1,
    )
    with keeping_gradients(policy) as found:
        metrics = trainer.train_step([Batch(experiences=tuple(experiences))])
    return found, metrics.values


@pytest.mark.parametrize("max_tokens", [500, 40], ids=["one pack", "many packs"])
def test_the_gradient_is_that_of_transformers_cross_entropy(max_tokens):
    """However it is split, and with sampled tokens at another temperature. Red when each pack takes its own mean, or
    when the tokens have the temperature of the calls."""
    model = make_model("qwen3", torch.float32)
    experiences = answered(record(model, make_experiences()))
    without, _ = gradients_of(model, experiences)
    found, values = gradients_of(model, experiences, max_tokens=max_tokens, echo=WEIGHT)
    plain, losses = plain_copy(model), []
    for one in experiences:
        ids_T = torch.from_numpy(one.ids_T.astype(np.int64))
        at = torch.from_numpy(np.flatnonzero(one.shown_T))
        assert len(at) == 4
        losses.append(cross_entropy(plain(input_ids=ids_T[None]).logits[0][at - 1], ids_T[at], reduction="none"))
    mean = torch.cat(losses).mean()
    (WEIGHT * mean).backward()
    mean = float(mean.detach())
    for name, parameter in plain.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name] - without[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert values["echo_nll"] == pytest.approx(mean, rel=1e-5)
    assert values["echo_loss"] == pytest.approx(WEIGHT * mean, rel=1e-5)


def test_groups_without_spread_teach_too():
    model = make_model("qwen3", torch.float32)
    same = [
        replace(one, advantages_T=np.zeros_like(one.advantages_T))
        for one in answered(record(model, make_experiences()))
    ]
    found, values = gradients_of(model, same, echo=WEIGHT)
    assert max(float(one.abs().max()) for one in found.values()) > 1e-4
    assert values["echo_nll"] > 0
    assert values["loss"] == pytest.approx(values["echo_loss"])


def test_further_entries_change_none_of_the_others():
    (one,) = pack(answered(make_experiences(1)), 10_000)
    more = one.with_echo()
    count = one.num_trained_tokens
    assert more.num_trained_tokens == count + 12
    for name in ("predict_E", "targets_E", "logprobs_E", "temperatures_E", "weights_E", "calls_E"):
        assert np.array_equal(getattr(more, name)[:count], getattr(one, name))
    assert set(more.temperatures_E[count:]) == {1.0}
    assert np.array_equal(more.targets_E[count:], one.echo_targets_F)
    (none,) = pack(make_experiences(1), 10_000)
    assert none.with_echo() is none


def test_rows_have_no_environment():
    with pytest.raises(ConfigError, match=r"loss\.echo has no effect"):
        resolve_supervised("sft", LossConfig(echo=0.1))
