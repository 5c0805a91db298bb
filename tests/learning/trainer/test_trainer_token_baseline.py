"""Baselines of tokens in a step: the gradient is that of what plain transformers compares each token with."""

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


def norms_of(twin, one):
    """The squared norm of each sampled token's gradient of logits, from whole distributions."""
    targets = np.flatnonzero(one.loss_mask_T)
    with torch.no_grad():
        logits_TV = twin(input_ids=torch.from_numpy(one.ids_T.astype(np.int64))[None], use_cache=False).logits[0]
    p_EV = (logits_TV[targets - 1] / torch.from_numpy(one.temperatures_T[targets])[:, None]).softmax(-1)
    sampled_EV = torch.nn.functional.one_hot(torch.from_numpy(one.ids_T[targets].astype(np.int64)), p_EV.shape[1])
    return (sampled_EV - p_EV).square().sum(-1).double().numpy()


def advantages_of(twin, experiences):
    """The advantage of each loss token of each sequence, group by group and place by place."""
    weights = [np.cumsum(norms_of(twin, one)) for one in experiences]
    returns = [one.advantages_T[one.loss_mask_T].astype(np.float64) for one in experiences]
    found = [value.copy() for value in returns]
    for number, one in enumerate(experiences):
        for place in range(len(weights[number])):
            others = [
                n for n, other in enumerate(experiences) if other.group_id == one.group_id and len(weights[n]) > place
            ]
            total = sum(weights[n][place] for n in others)
            found[number][place] -= sum(weights[n][place] * returns[n][place] for n in others) / total
    return found


@pytest.mark.parametrize("max_tokens", [30, 10_000])
def test_the_gradient_is_that_of_the_advantages_however_the_step_is_split(max_tokens):
    """Red when W is summed by call, when groups are mixed, or when the distributions of other tokens are taken."""
    module = make_model("qwen3")
    twin = plain_copy(module)
    experiences = record(twin, make_experiences())
    expected = advantages_of(twin, experiences)
    for one, advantages_E in zip(experiences, expected, strict=True):
        factor = torch.from_numpy(one.weights_T[one.loss_mask_T] * advantages_E)
        (-factor.double() * hf_logprobs(twin, one)).sum().backward()
    trainer = Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=resolve("otb", LossConfig(), 8),
        config=TrainerConfig(max_tokens_per_micro_batch=max_tokens, eps=1e-3),
        learning_rate=1e-3,
        planned_updates=10,
        tolerance=Tolerance(mean=None, max=1e-4),
    )
    with keeping_gradients(trainer.policy) as found:
        metrics = trainer.train_step([Batch(experiences=tuple(experiences))])
    assert metrics.skipped_tokens == 0
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-6, rtol=1e-4)
