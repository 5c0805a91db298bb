"""The balance loss of mixtures of experts: by hand, for each kind of router, and however an update is split."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from expert_toys import TRAINED, copy_of, make_experts
from test_trainer_experts import sampled_by_engine, with_routes
from trainer_toys import Batch, make_experiences, make_model

from sharpen.config.run import LossConfig
from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.supervised import SUPERVISED
from sharpen.learning.trainer.loss import BalanceLoss
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.settings import check_lora
from sharpen.learning.trainer.team import Team
from sharpen.learning.trainer.trainer import Trainer
from sharpen.learning.trainer.work import Part
from sharpen.models.balance import Balance, count_choices
from sharpen.models.routing import is_router

BY_SIGMOID = {"deepseek_v3", "glm4_moe", "lfm2_moe", "llama4_text"}


def balance_of(shares_E, weights_N, coef=1.0):
    return Balance(coef=coef, weights_N=torch.tensor(weights_N), shares_LE=torch.tensor([shares_E]))


def test_by_hand_with_softmax():
    """Two experts, two tokens that count 1/4 and 3/4, with the probabilities (1/2, 1/2) and (9/10, 1/10); three of four
    choices fell on the first: 2 * (3/4 * (1/8 + 27/40) + 1/4 * (1/8 + 3/40)) = 1.3."""
    logits_NE = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]])).requires_grad_()
    balance = balance_of([0.75, 0.25], [0.25, 0.75], coef=10.0)
    added_NE = balance.add(logits_NE, 0, by_sigmoid=False)
    assert torch.equal(added_NE, logits_NE)
    assert balance.value == pytest.approx(1.3)
    added_NE.sum().backward()
    # d/dlogit_0 of the second token's term: 10 * 2 * 3/4 * p_0 * p_1 * (3/4 - 1/4), beside the 1 of the sum itself
    assert logits_NE.grad[1].tolist() == pytest.approx([1 + 0.675, 1 - 0.675])


def test_by_hand_with_sigmoids_divided_by_their_sum():
    """Sigmoids (0.5, 0.25) are the probabilities (2/3, 1/3): 2 * (3/4 * 2/3 + 1/4 * 1/3) = 7/6."""
    logits_NE = torch.logit(torch.tensor([[0.5, 0.25]])).requires_grad_()
    balance = balance_of([0.75, 0.25], [1.0])
    balance.add(logits_NE, 0, by_sigmoid=True)
    assert balance.value == pytest.approx(7 / 6)


def test_small_imbalances_are_not_rounded_away():
    """Under bfloat16's autocast the gradient is the same. Red when the means are a product, which autocast rounds."""
    generator = torch.Generator().manual_seed(0)
    logits_NE = torch.randn(64, 8, generator=generator)
    shares_E = 1 / 8 + 0.001 * torch.randn(8, generator=generator)
    weights_N = torch.full((64,), 1 / 64)

    def gradient(autocast):
        own_NE = logits_NE.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            balance = Balance(coef=1.0, weights_N=weights_N, shares_LE=shares_E[None])
            added_NE = balance.add(own_NE, 0, by_sigmoid=False)
        added_NE.backward(torch.zeros_like(added_NE))
        return own_NE.grad

    assert gradient(False).abs().max() > 0
    assert torch.equal(gradient(True), gradient(False))


def test_choices_are_counted_by_layer_each_token_as_often_as_it_counts():
    routes_NLK = np.array([[[0, 1], [2, 0]], [[1, 2], [2, 1]]], np.uint8)
    counted = count_choices(routes_NLK, np.array([1, 3]), 3)
    assert counted.tolist() == [[1, 4, 3], [1, 3, 4]]


def policy_of(family="qwen3_moe", checkpointing=False):
    return TrainedModel(make_experts(family), compute_dtype=torch.float32, gradient_checkpointing=checkpointing)


def expected_loss(policy, experiences):
    """The loss from what transformers' routers return for whole sequences, in one piece; shape ()."""
    model, num_experts = copy_of(policy.module), policy.routing.shape.num_experts
    found = []
    which = 1 if model.config.model_type == "llama4_text" else 0  # its scores come first
    routers = [module for module in model.modules() if is_router(module)]
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[which])) for router in routers]
    logits_LN, routes = [], []
    for one in experiences:
        found.clear()
        model(input_ids=torch.from_numpy(one.ids_T.astype(np.int64))[None], use_cache=False)
        at = torch.from_numpy(np.flatnonzero(one.loss_mask_T) - 1)
        logits_LN.append(torch.stack([logits[at] for logits in found]))
        routes.append(one.routes_NLK[at.numpy()])
    for hook in hooks:
        hook.remove()
    chosen, logits_LNE = np.concatenate(routes), torch.cat(logits_LN, 1)
    probs_LNE = logits_LNE.softmax(-1)
    if policy.module.config.model_type in BY_SIGMOID:
        probs_LNE = logits_LNE.sigmoid() / logits_LNE.sigmoid().sum(-1, keepdim=True)
    terms = []
    for layer in range(len(probs_LNE)):
        shares_E = np.bincount(chosen[:, layer].ravel(), minlength=num_experts) / chosen[:, layer].size
        terms.append(num_experts * (probs_LNE[layer].mean(0) * torch.from_numpy(shares_E)).sum())
    return sum(terms) / len(terms), model


def backward(policy, experiences, max_tokens, coef=1.0):
    """Gradients of the balance loss alone, and its value."""
    parts = [Part(pack=one) for one in pack(experiences, max_tokens, min_shared_tokens=4)]
    policy.module.zero_grad()
    total = 0.0
    for part, balance in zip(parts, BalanceLoss(policy, coef, Team()).of(parts), strict=True):
        (policy.score(part.pack, balance=balance).logprobs_E.sum() * 0.0).backward()
        total += balance.value
    gradients = {name: parameter.grad.clone() for name, parameter in policy.parameters() if parameter.grad is not None}
    return gradients, total, len(parts)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_of_an_update_is_that_of_its_sequences_however_they_are_packed(checkpointing):
    """Break: `_weights` counts each computed token once, or `of` takes a pack's own shares."""
    policy = policy_of(checkpointing=checkpointing)
    experiences = with_routes(policy.module, make_experiences(num_groups=2))
    loss, model = expected_loss(policy, experiences)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for max_tokens in (10_000, 40):
        gradients, total, num_packs = backward(policy, experiences, max_tokens)
        assert (num_packs > 1) == (max_tokens == 40)
        assert total == pytest.approx(loss.item(), rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("family", TRAINED)
def test_every_kind_of_router_is_pushed_towards_balance(family):
    """A step along the negative gradient of the routers lowers the loss at the same choices. Break: always take the
    softmax."""
    policy = policy_of(family)
    experiences = with_routes(policy.module, make_experiences(num_groups=1))
    gradients, before, _ = backward(policy, experiences, 10_000)
    assert before == pytest.approx(expected_loss(policy, experiences)[0].item(), rel=1e-4)
    with torch.no_grad():
        for name, parameter in policy.parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter -= 0.05 * gradients[name] / gradients[name].norm()
    _, after, _ = backward(policy, experiences, 10_000)
    assert after < before


def test_rows_without_recorded_experts_have_the_loss_of_the_models_own_choice():
    policy = policy_of()
    experiences = make_experiences(num_groups=2)
    gradients, total, _ = backward(policy, experiences, 40)
    recorded, of_recorded, _ = backward(policy, with_routes(policy.module, experiences), 40)
    assert total == pytest.approx(of_recorded, rel=1e-5)
    torch.testing.assert_close(gradients, recorded, atol=1e-6, rtol=1e-3)


def step(balance_coef, algorithm, experiences):
    policy = policy_of()
    trainer = Trainer(
        policy,
        algorithm=algorithm,
        config=TrainerConfig(balance_coef=balance_coef),
        learning_rate=0.01,
        planned_updates=4,
    )
    return trainer.train_step([Batch(experiences=tuple(experiences))]), dict(policy.parameters())


def test_a_step_reports_it_and_it_changes_the_update():
    experiences = sampled_by_engine(make_experts("qwen3_moe"))
    algorithm = resolve("multi_step_grpo", LossConfig(kl="none"), 8)
    plain, without = step(0.0, algorithm, experiences)
    balanced, weights = step(5.0, algorithm, experiences)
    assert "balance_loss" not in plain.values
    assert 1.0 <= balanced.values["balance_loss"] < 8.0
    assert balanced.values["loss"] == pytest.approx(plain.values["loss"], abs=1e-6)
    assert any(not torch.equal(weights[name], parameter) for name, parameter in without.items())


def test_a_step_on_rows_reports_it():
    rows = [replace(one, advantages_T=np.zeros_like(one.advantages_T)) for one in make_experiences(num_groups=1)]
    metrics, _ = step(1.0, SUPERVISED["sft"], rows)
    assert 1.0 <= metrics.values["balance_loss"] < 8.0


def test_it_is_refused_where_it_would_have_no_effect():
    dense = TrainedModel(make_model("qwen3", torch.float32), compute_dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"balance_coef is 0\.1, .*qwen3.* has no experts"):
        BalanceLoss(dense, 0.1, Team())
    with pytest.raises(ConfigError, match=r"balance_coef is 0\.1, .*trainer\.lora the routers are frozen"):
        check_lora(TrainerConfig(lora=LoraConfig(), balance_coef=0.1))
