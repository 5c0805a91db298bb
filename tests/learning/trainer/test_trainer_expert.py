"""The expert's rows in an update: the mixed gradient against plain transformers, and what it does not depend on."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from trainer_toys import (
    hf_logprobs,
    keeping_gradients,
    make_experience,
    make_experiences,
    make_model,
    plain_copy,
    record,
)

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.learning.algorithm.expert import Expert
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.trainer import Trainer
from sharpen.types import Experience

CHORD = Expert(mu=0.6, mu_valley=0.2, mu_warmup_steps=2, mu_decay_steps=2, phi=True)


@dataclass(frozen=True, kw_only=True)
class Mixed:
    experiences: tuple[Experience, ...]
    experts: tuple[Experience, ...]


def make_trainer(module, *, expert=CHORD, kl="none", kl_coef=None, reference=None, max_tokens=80, rate=1e-3, epochs=1):
    algorithm = resolve("mix", LossConfig(kl=kl, kl_coef=kl_coef), 8)
    return Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=replace(algorithm, expert=expert),
        config=TrainerConfig(max_tokens_per_micro_batch=max_tokens, eps=1e-3, epochs=epochs),
        learning_rate=rate,
        planned_updates=10,
        reference=reference,
        tolerance=Tolerance(mean=None, max=1e-4),
    )


def make_experts(count: int = 5, seed: int = 3) -> list[Experience]:
    """Rows as `supervised` makes them: nobody's logprobs (0) of no version (-1), weights that add up to 1."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        ids = rng.integers(3, 60, 12 + number).tolist()
        row = make_experience(f"expert/{number}", ids, [(7, len(ids))], advantage=1.0)
        zeros_T = np.zeros(len(ids), np.float32)
        rows.append(replace(row, logprobs_T=zeros_T, versions_T=np.full(len(ids), -1, np.int32)))
    total = sum(int(row.loss_mask_T.sum()) for row in rows)
    return [replace(row, weights_T=(row.loss_mask_T / total).astype(np.float32)) for row in rows]


def plain_loss(twin, experiences, experts, mu, phi):
    """The update's loss by transformers alone, one sequence at a time, at equal weights (all ratios are 1)."""
    total = torch.zeros((), dtype=torch.float64)
    for one in experiences:
        factor = torch.from_numpy((one.weights_T * one.advantages_T)[one.loss_mask_T]).double()
        logprobs = hf_logprobs(twin, one)
        total = total - (1 - mu) * (factor * (logprobs - logprobs.detach()).exp()).sum()
    for one in experts:
        logprobs = hf_logprobs(twin, one)
        p = logprobs.detach().exp()
        weights = torch.from_numpy(one.weights_T[one.loss_mask_T]).double()
        total = total - mu * (weights * (p * (1 - p) if phi else 1.0) * logprobs).sum()
    return total


def gradients(twin):
    return {name: parameter.grad.clone() for name, parameter in twin.named_parameters()}


def captured(trainer, batch, step):
    """The gradient that a step's update is made with."""
    with keeping_gradients(trainer.policy) as found:
        metrics = trainer.train_step([batch], step=step)
    return found, metrics


@pytest.mark.parametrize(("step", "mu"), [(1, 0.3), (2, 0.6), (3, 0.4), (9, 0.2)])
@pytest.mark.parametrize("phi", [False, True])
def test_the_mixed_gradient_is_that_of_both_parts_with_their_weights(step, mu, phi):
    """fp64; mu by hand from the schedule. The gradient is below the clipping norm, so it is seen as it was made."""
    module = make_model("llama")
    twin = plain_copy(module)
    experiences, experts = record(twin, make_experiences()), make_experts()
    loss = 0.05 * plain_loss(twin, experiences, experts, mu, phi)
    loss.backward()
    small = [[replace(one, weights_T=0.05 * one.weights_T) for one in rows] for rows in (experiences, experts)]
    trainer = make_trainer(module, expert=replace(CHORD, phi=phi))
    found, metrics = captured(trainer, Mixed(experiences=tuple(small[0]), experts=tuple(small[1])), step)
    assert metrics.values["grad_norm"] < 1
    assert metrics.values["mu"] == pytest.approx(mu)
    assert metrics.values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, expected in gradients(twin).items():
        torch.testing.assert_close(found[name], expected, atol=1e-8, rtol=1e-5)


def test_trap_19_no_split_order_or_duplication_of_the_experts_rows_changes_the_update():
    """Micro-batches of a few tokens or all at once, any order, each row twice with half its weight: the same weights
    after the update, to 1e-6 in fp64.

    Red when `backward` (learning/trainer/expert_loss.py) takes the mean of a pack instead of the given weights.
    """
    experts = make_experts()
    twice = [
        replace(row, rollout_id=f"{row.rollout_id}#{n}", weights_T=row.weights_T / 2) for row in experts for n in (1, 2)
    ]
    variants = [(experts, 80), (experts, 13), (experts, 10_000), (experts[::-1], 80), (twice, 40)]
    after = []
    for rows, max_tokens in variants:
        module = make_model("qwen3")
        experiences = record(plain_copy(module), make_experiences())
        trainer = make_trainer(module, max_tokens=max_tokens)
        trainer.train_step([Mixed(experiences=tuple(experiences), experts=tuple(rows))], step=2)
        after.append({name: tensor.clone() for name, tensor in trainer.state_tensors().items()})
    for other in after[1:]:
        for name, tensor in after[0].items():
            torch.testing.assert_close(other[name], tensor, atol=1e-6, rtol=0)


def test_the_experts_tokens_enter_no_number_of_the_rollouts():
    """Parity, ratio, clip fraction, entropy and KL are those of the rollouts, and the KL term keeps its coefficient."""
    reference = TrainedModel(make_model("qwen3", seed=5), compute_dtype=torch.float64)
    found = []
    for rows in ((), tuple(make_experts())):
        module = make_model("qwen3")
        experiences = tuple(record(plain_copy(module), make_experiences()))
        trainer = make_trainer(module, kl="k2", kl_coef=0.1, reference=reference)
        found.append(trainer.train_step([Mixed(experiences=experiences, experts=rows)], step=2))
    alone, mixed = (one.values for one in found)
    same = ("clip_fraction", "kl_old", "ratio_mean", "ratio_max", "kl_reference", "kl_loss", "entropy", "sample_share")
    for name in (*same, "policy_loss", "logprob_gap_tokens", "logprob_gap_max"):
        assert mixed[name] == alone[name], name
    assert mixed["loss"] == pytest.approx(mixed["policy_loss"] + mixed["kl_loss"] + mixed["expert_loss"])
    assert found[1].trained_tokens - found[0].trained_tokens == sum(
        int(row.loss_mask_T.sum()) for row in make_experts()
    )


def test_weight_one_is_supervised_fine_tuning_and_weight_zero_none_of_it():
    """With mu 1 the rollouts' gradient is exactly 0; with mu 0 that of the expert."""
    experts = tuple(make_experts())
    for mu, kept in ((1.0, "experts"), (0.0, "experiences")):
        module = make_model("qwen3")
        experiences = tuple(record(plain_copy(module), make_experiences()))
        whole = Mixed(experiences=experiences, experts=experts)
        part = replace(whole, **{"experiences": (), "experts": (), kept: getattr(whole, kept)})
        results = [
            captured(make_trainer(make_model("qwen3"), expert=Expert(mu=mu)), batch, 1)[0] for batch in (whole, part)
        ]
        for name, gradient in results[0].items():
            torch.testing.assert_close(gradient, results[1][name], atol=1e-9, rtol=1e-6)


def test_an_update_may_hold_the_expert_alone_and_every_epoch_trains_it():
    module = make_model("qwen3")
    trainer = make_trainer(module, expert=Expert(mu=1.0), rate=0.01, epochs=3)
    metrics = trainer.train_step([Mixed(experiences=(), experts=tuple(make_experts()))], step=1)
    assert (metrics.version, metrics.num_updates) == (3, 3)
    assert "entropy" not in metrics.values
    assert "logprob_gap_tokens" not in metrics.values
    again = trainer.train_step([Mixed(experiences=(), experts=tuple(make_experts()))], step=2)
    assert again.values["expert_nll"] < metrics.values["expert_nll"]


def test_the_step_is_required():
    with pytest.raises(AssertionError):
        make_trainer(make_model("qwen3")).train_step([Mixed(experiences=(), experts=tuple(make_experts()))])
