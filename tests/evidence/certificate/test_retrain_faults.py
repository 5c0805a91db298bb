"""Faults planted one after the other in the update that the trainer makes of a right batch: each is found by repeating
the update, where the rest of the certificate sees nothing. The same step without a fault is found right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise
from faulty_update import STEP, FaultyUpdate, make_run, with_settings
from transformers import AutoModelForCausalLM

from sharpen.evidence.certificate.certify import certify, read_resolved
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.learning.trainer.optimizer import learning_rate
from sharpen.learning.trainer.parity import Tolerance

Fault = Callable[[FaultyUpdate], None]

SINGLE = ("grpo", {})
UNCLIPPED = ("grpo", {"trainer.max_grad_norm": 100.0})
SEVERAL = ("grpo", {"trainer.num_minibatches": 2, "trainer.epochs": 2})
ENTROPY = ("dapo", {"loss.entropy_coef": 0.05, "sampling.max_refill": 0.0, "loss.std_threshold": None})
ADAPTERS = ("grpo", {"trainer.lora.rank": 4})
FOUR_BITS = ("grpo", {"trainer.lora.rank": 4, "trainer.lora.base": "nf4"})
WARMUP = ("grpo", {"trainer.warmup_steps": 8})
PROXIMAL = ("gspo", {"trainer.num_minibatches": 2})
ROUNDED = ("grpo", {"trainer.dtype": "bfloat16"})
CRITIC = ("ppo", {"loss.kl": "k1", "loss.kl_coef": 0.05, "loss.kl_in": "reward"})
CRITIC_BESIDE = ("ppo", {"trainer.lora.rank": 4, "trainer.lora.base": "nf4"})
MUON = ("grpo", {"trainer.optimizer": "muon"})
MUONS = ("grpo", {"trainer.optimizer": "muon", "trainer.num_minibatches": 2})
CLIP_B = ("grpo", {"loss.advantage": "clipb", "loss.advantage_args": {"mu": 0.5}})
CLIP_V = ("grpo", {"loss.advantage": "clipv", "loss.advantage_args": {"mu": 0.5, "max_frac": 0.1}})
TOKENS = ("otb", {})
DPPO = ("dppo", {"loss.policy_loss_args": {"low": 1e-3, "high": 1e-3}, **SEVERAL[1]})
VESPO = ("vespo", SEVERAL[1])
SEQUENCES = ("grpo", {"loss.sequence_mask": 1e-3, **SEVERAL[1]})
AHEAD = ("grpo", {"sync.offset": 1, "loss.behaviour": "truncated"})
LIKE_SINGLE = (UNCLIPPED, SEVERAL, ENTROPY, WARMUP, PROXIMAL, CLIP_B, CLIP_V, TOKENS, DPPO, VESPO, SEQUENCES)
"""Other updates of the same weights and moments, from rollouts that the same engine samples: of one run."""


def algorithm(**changes: Any) -> Fault:
    """Train by another algorithm than the settings say."""

    def plant(update: FaultyUpdate) -> None:
        loss = update.trainer._loss
        loss.algorithm = replace(loss.algorithm, **changes)

    return plant


def settings(**changes: Any) -> Fault:
    """Let the optimizer have other settings of the trainer."""

    def plant(update: FaultyUpdate) -> None:
        update.optimizer._config = update.optimizer._config.model_copy(update=changes)

    return plant


def groups(**changes: Any) -> Fault:
    """Change AdamW's own settings."""

    def plant(update: FaultyUpdate) -> None:
        for group in update.groups():
            group.update(changes)

    return plant


def gradients(change: Callable[[torch.Tensor], torch.Tensor], part: str = "") -> Fault:
    return lambda update: update.gradients(change, part)


def tokens(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    return lambda update: update.loss_tokens(name, change)


def weights(change: Callable[[torch.Tensor], torch.Tensor], part: str = "") -> Fault:
    """Change weights after each update."""

    def plant(update: FaultyUpdate) -> None:
        def change_all() -> None:
            with torch.no_grad():
                for name, parameter in update.parameters.items():
                    if part in name:
                        parameter.copy_(change(parameter))

        update.after_apply(change_all)

    return plant


def drop_a_sequence(update: FaultyUpdate) -> None:
    first = update.batches[0][0]
    update.each(lambda one: None if one is first else one)


def advantages_roll(update: FaultyUpdate) -> None:
    """Each loss token has the advantage of the one before it in the batch."""
    values = np.concatenate([one.advantages_T[one.loss_mask_T] for one in update.batches[0]])
    rolled = iter(np.roll(values, 1))
    update.loss_tokens("advantages_T", lambda of_one: np.array([next(rolled) for _ in of_one], np.float32))


def only_rows_of_inputs(update: FaultyUpdate) -> None:
    shown = sorted({int(token) for one in update.batches[0] for token in one.ids_T[:-1]})
    kept = torch.zeros(len(update.parameters["model.embed_tokens.weight"]), 1)
    kept[shown] = 1.0
    update.gradients(lambda gradient: gradient * kept, "embed")


def skip_the_bad(update: FaultyUpdate) -> None:
    update.each(lambda one: None if (one.advantages_T < 0).any() else one)


def a_token_late(update: FaultyUpdate) -> None:
    """The loss of each call begins one token late."""

    def late(one):
        mask = one.loss_mask_T & np.roll(one.loss_mask_T, 1)
        return replace(
            one,
            loss_mask_T=mask,
            weights_T=np.where(mask, one.weights_T, np.float32(0)),
            logprobs_T=np.where(mask, one.logprobs_T, np.float32(0)),
            versions_T=np.where(mask, one.versions_T, np.int32(-1)),
            calls_T=np.where(mask, one.calls_T, np.int32(-1)),
        )

    update.each(late)


def clip_each(update: FaultyUpdate) -> None:
    """Clip every tensor by itself."""

    def clip() -> None:
        for parameter in update.parameters.values():
            torch.nn.utils.clip_grad_norm_([parameter], 0.2)

    update.before_apply(clip)


def keep_gradients(update: FaultyUpdate) -> None:
    """The gradients of the update before are still there."""
    update.optimizer.zero_grad = lambda: None
    for parameter in update.parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)


def no_moments(update: FaultyUpdate) -> None:
    """As after a resume that lost them."""
    update.optimizer.load_state_tensors({})


def step_twice(update: FaultyUpdate) -> None:
    def again() -> None:
        for rule in update.optimizer._rules:
            rule.step()

    update.after_apply(again)


def no_step(update: FaultyUpdate) -> None:
    for rule in update.optimizer._rules:
        rule.step = lambda: None


def wrong_count(update: FaultyUpdate) -> None:
    """The bias correction counts one update too many."""
    for rule in update.optimizer._rules:
        for state in rule.state.values():
            state["step"] += 1


def as_in_the_engine(update: FaultyUpdate) -> None:
    """The engine computes with the same layers: no logprob differs."""
    update.trainer._loss.tolerance = Tolerance(mean=None, max=1.0)


def base_not_rounded(update: FaultyUpdate) -> None:
    """One layer computes with its weight as it was before it was rounded to 4 bits."""
    model = AutoModelForCausalLM.from_pretrained(read_resolved(update.run / "resolved.json").model.model_path)
    name = "model.layers.1.mlp.up_proj"
    update.trainer.policy._layers[name].base_layer = model.get_submodule(name).requires_grad_(False)
    as_in_the_engine(update)


def base_of_another_scale(update: FaultyUpdate) -> None:
    """One of 32 blocks of a layer has a scale that is 5% larger."""
    layer = update.trainer.policy._layers["model.layers.1.mlp.down_proj"].base_layer
    scales, whole = dequantize_blockwise(layer.state.absmax, layer.state.state2) + layer.state.offset, layer.whole()
    scales[3] *= 1.05
    layer.state.absmax, layer.state.offset, layer.state.nested = scales, None, False
    assert 0.04 < ((layer.whole() - whole).norm() / whole[3].norm()).item() < 0.06
    as_in_the_engine(update)


def second_moment_unclipped(update: FaultyUpdate) -> None:
    """The second moment is of the gradients before the clip."""
    kept: dict[str, torch.Tensor] = {}

    def keep() -> None:
        kept.update({name: one.grad.clone() for name, one in update.parameters.items() if one.grad is not None})

    def spoil() -> None:
        for rule in update.optimizer._rules:
            for name, one in update.parameters.items():
                if name in kept and one in rule.state:
                    rule.state[one]["exp_avg_sq"].add_(0.001 * (kept[name] ** 2 - one.grad**2))

    update.before_apply(keep)
    update.after_apply(spoil)


def decay_in_gradient(update: FaultyUpdate) -> None:
    """Adam with L2 in place of AdamW."""
    for group in update.groups():
        group["weight_decay"] = 0.0

    def add() -> None:
        for parameter in update.parameters.values():
            if parameter.ndim >= 2:
                parameter.grad.add_(parameter.detach(), alpha=0.1)

    update.before_apply(add)


def one_row_stays(update: FaultyUpdate) -> None:
    row = next(iter(update.batches[0])).ids_T[-1]
    before = update.parameters["model.embed_tokens.weight"][row].detach().clone()

    def restore() -> None:
        with torch.no_grad():
            update.parameters["model.embed_tokens.weight"][row] = before

    update.after_apply(restore)


def one_weight_off(update: FaultyUpdate) -> None:
    """A single number of 2,048 gets a hundredth of an update more."""

    def move() -> None:
        with torch.no_grad():
            update.parameters["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-4

    update.after_apply(move)


def swap_minibatches(update: FaultyUpdate) -> None:
    update.batches.reverse()


def first_minibatch_only(update: FaultyUpdate) -> None:
    update.batches = update.batches[:1]


def one_epoch(update: FaultyUpdate) -> None:
    update.trainer._epochs = 1


def reference_of_now(update: FaultyUpdate) -> None:
    """The KL term compares with the current weights."""
    update.trainer._loss._reference = update.trainer.policy


def last_rate(update: FaultyUpdate) -> None:
    """The learning rate of the update before."""
    apply = update.optimizer.apply
    update.optimizer.apply = lambda number, norm: apply(number - 1, norm)


def critic_stays(update: FaultyUpdate) -> None:
    for rule in update.trainer._optimizers[1]._rules:
        rule.step = lambda: None


def critic_slow(update: FaultyUpdate) -> None:
    update.trainer._optimizers[1]._peak /= 10


def to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


FAULTS: dict[str, tuple[tuple[str, dict[str, Any]], Fault]] = {
    "the loss has the wrong sign": (SINGLE, gradients(lambda g: -g)),
    "a block's gradient is negated": (SINGLE, gradients(lambda g: -g, "layers.0.mlp")),
    "a block does not learn": (SINGLE, gradients(lambda g: 0 * g, "layers.1.")),
    "a tensor does not learn": (SINGLE, gradients(lambda g: 0 * g, "layers.1.input_layernorm")),
    "the attention's backward pass has a factor 2": (SINGLE, gradients(lambda g: 2 * g, "q_proj")),
    "gradients are averaged over two ranks": (UNCLIPPED, gradients(lambda g: g / 2)),
    "gradients are rounded to bfloat16": (SINGLE, gradients(to_bfloat16)),
    "gradients have noise of one in a thousand": (SINGLE, gradients(lambda g: g * (1 + 1e-3 * torch.randn_like(g)))),
    "tied embeddings learn from one side alone": (SINGLE, only_rows_of_inputs),
    "no clip": (SINGLE, settings(max_grad_norm=1e9)),
    "another clip": (SINGLE, settings(max_grad_norm=0.1)),
    "each tensor is clipped by itself": (SINGLE, clip_each),
    "advantages belong to the next token": (SINGLE, advantages_roll),
    "advantages lose their sign": (SINGLE, tokens("advantages_T", np.abs)),
    "weights are squared": (SINGLE, tokens("weights_T", np.square)),
    "a sequence is dropped": (SINGLE, drop_a_sequence),
    "negative advantages are skipped": (SINGLE, skip_the_bad),
    "the loss begins a token late": (SINGLE, a_token_late),
    "betas are swapped": (SINGLE, groups(betas=(0.999, 0.9))),
    "epsilon is large": (SINGLE, groups(eps=1e-4)),
    "a tenth of the learning rate": (SINGLE, lambda update: setattr(update.optimizer, "_peak", 1e-3)),
    "no decay": (SINGLE, groups(weight_decay=0.0)),
    "everything decays": (SINGLE, groups(weight_decay=0.1)),
    "the decay is in the gradient": (SINGLE, decay_in_gradient),
    "gradients are not zeroed": (SINGLE, keep_gradients),
    "the moments are lost": (SINGLE, no_moments),
    "each update is applied twice": (SINGLE, step_twice),
    "no update is applied": (SINGLE, no_step),
    "the bias correction counts wrongly": (SINGLE, wrong_count),
    "the second moment is of other gradients": (SINGLE, second_moment_unclipped),
    "masters are rounded to bfloat16": (SINGLE, weights(to_bfloat16)),
    "one layer is rounded": (SINGLE, weights(to_bfloat16, "layers.0.mlp.down_proj")),
    "a row of the embeddings stays": (SINGLE, one_row_stays),
    "one weight is off": (SINGLE, one_weight_off),
    "no KL term": (SINGLE, algorithm(kl_coef=0.0)),
    "another KL estimator": (SINGLE, algorithm(kl="k3", kl_coef=0.1)),
    "a tenfold KL term": (SINGLE, algorithm(kl_coef=0.01)),
    "the reference is the current model": (SINGLE, reference_of_now),
    "minibatches in another order": (SEVERAL, swap_minibatches),
    "a minibatch is left out": (SEVERAL, first_minibatch_only),
    "one epoch too few": (SEVERAL, one_epoch),
    "another clip of the ratio": (SEVERAL, algorithm(policy_loss_args={"clip_low": 1e-3, "clip_high": 1e-3})),
    "no ratio": (SEVERAL, algorithm(policy_loss="reinforce", policy_loss_args={})),
    "the entropy bonus has the wrong sign": (ENTROPY, algorithm(entropy_coef=-0.05)),
    "no entropy bonus": (ENTROPY, algorithm(entropy_coef=0.0)),
    "adapters' first halves stay": (ADAPTERS, gradients(lambda g: 0 * g, "lora_A")),
    "adapters are scaled twice": (ADAPTERS, gradients(lambda g: 2 * g, "lora_B")),
    "over 4 bits, adapters' first halves stay": (FOUR_BITS, gradients(lambda g: 0 * g, "lora_A")),
    "over 4 bits, gradients have noise of one in a thousand": (
        FOUR_BITS,
        gradients(lambda g: g * (1 + 1e-3 * torch.randn_like(g))),
    ),
    "over 4 bits, a layer is not rounded": (FOUR_BITS, base_not_rounded),
    "over 4 bits, a block of 64 weights is 5% larger": (FOUR_BITS, base_of_another_scale),
    "over 4 bits, a tenth of the learning rate": (FOUR_BITS, lambda update: setattr(update.optimizer, "_peak", 1e-3)),
    "the rate of the update before": (WARMUP, last_rate),
    "no warm-up": (WARMUP, settings(warmup_steps=0)),
    "ratios of tokens in place of calls": (PROXIMAL, algorithm(policy_loss="ppo", policy_loss_args={})),
    "in bfloat16, a block's gradient is negated": (ROUNDED, gradients(lambda g: -g, "layers.0.mlp")),
    "in bfloat16, a block does not learn": (ROUNDED, gradients(lambda g: 0 * g, "layers.1.")),
    "in bfloat16, no clip": (ROUNDED, settings(max_grad_norm=1e9)),
    "in bfloat16, a tenth of the learning rate": (ROUNDED, lambda update: setattr(update.optimizer, "_peak", 1e-3)),
    "in bfloat16, the moments are lost": (ROUNDED, no_moments),
    "in bfloat16, a sequence is dropped": (ROUNDED, drop_a_sequence),
    "in bfloat16, masters are rounded too": (ROUNDED, weights(to_bfloat16)),
    "advantages are not discounted by lambda": (CRITIC, algorithm(advantage_args={"lam": 1.0})),
    "advantages are not whitened": (CRITIC, algorithm(advantage_args={"whiten": False})),
    "no KL penalty in the reward": (CRITIC, algorithm(kl_coef=0.0)),
    "the critic does not learn": (CRITIC, critic_stays),
    "the critic learns a tenth": (CRITIC, critic_slow),
    "beside adapters, the critic learns a tenth": (CRITIC_BESIDE, critic_slow),
    "with Muon, a block's gradient is negated": (MUON, gradients(lambda g: -g, "layers.0.mlp")),
    "with Muon, a tensor does not learn": (MUON, gradients(lambda g: 0 * g, "layers.1.mlp.up_proj")),
    "with Muon, no clip": (MUON, settings(max_grad_norm=1e9)),
    "with Muon, a tenth of the learning rate": (MUON, lambda update: setattr(update.optimizer, "_peak", 1e-3)),
    "with Muon, its moment keeps less": (MUON, groups(momentum=0.9)),
    "with Muon, no step ahead": (MUON, groups(nesterov=False)),
    "with Muon, steps of another size": (MUON, groups(adjust_lr_fn="original")),
    "with Muon, three steps in place of five": (MUON, groups(ns_steps=3)),
    "with Muon, the moments are lost": (MUON, no_moments),
    "with Muon, each update is applied twice": (MUON, step_twice),
    "with Muon, a block does not learn from several updates": (MUONS, gradients(lambda g: 0 * g, "layers.1.")),
    "with Muon, steps of another size in several updates": (MUONS, groups(adjust_lr_fn="original")),
    "no token is left out for its entropy": (CLIP_B, algorithm(advantage="grpo", advantage_args={})),
    "another bound of the entropy clip": (CLIP_B, algorithm(advantage_args={"mu": 0.6})),
    "tokens compared with their own distribution": (CLIP_B, algorithm(advantage="clipv", advantage_args={"mu": 0.5})),
    "more tokens are left out for their entropy": (CLIP_V, algorithm(advantage_args={"mu": 0.5, "max_frac": 0.2})),
    "tokens compared with those of the step": (CLIP_V, algorithm(advantage="clipb", advantage_args={"mu": 0.5})),
    "the baseline is the group's mean": (TOKENS, algorithm(advantage="rec")),
    "another bound of the probability": (DPPO, algorithm(policy_loss_args={})),
    "calls are weighed alike": (VESPO, algorithm(policy_loss="reinforce")),
    "calls are weighed as if their advantage were positive": (
        VESPO,
        algorithm(policy_loss_args={"k_neg": 2.0, "lambda_neg": 3.0}),
    ),
    "bad calls that are no longer likely are trained": (SEQUENCES, algorithm(sequence_mask=None)),
    "no behaviour weight": (AHEAD, algorithm(behaviour="unweighted", behaviour_high=None)),
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, toy_model_dir, toy_dataset) -> Callable[[tuple[str, dict[str, Any]]], Path]:
    """Make a run with these settings, once; where only its updates are others than those of `SINGLE`, of that run."""
    made: dict[str, Path] = {}

    def make(kind: tuple[str, dict[str, Any]]) -> Path:
        key, folder = repr(kind), tmp_path_factory.mktemp("run")
        if key not in made and kind in LIKE_SINGLE:
            made[key] = with_settings(make(SINGLE), folder / "run", kind[0], **kind[1])
        elif key not in made:
            made[key] = make_run(folder, toy_model_dir, toy_dataset, kind[0], **kind[1])
        return made[key]

    return make


KINDS = {repr(kind): kind for kind, _ in FAULTS.values()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_without_a_fault_is_found_right(kind, run_of, tmp_path):
    update = FaultyUpdate(run_of(kind), tmp_path / "run")
    update.train()
    found = update.found()
    assert not found.problems
    assert not found.not_repeated
    assert found.repeated[0].cosine > (0.9 if kind in (ROUNDED, MUON, MUONS) else 1 - 1e-6)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_update_is_found(name, run_of, tmp_path):
    kind, plant = FAULTS[name]
    update = FaultyUpdate(run_of(kind), tmp_path / "run")
    plant(update)
    update.train()
    found = update.found()
    assert found.problems, found.repeated


def test_nothing_else_of_the_certificate_sees_such_a_fault(run_of, tmp_path):
    update = FaultyUpdate(run_of(SINGLE), tmp_path / "run")
    update.gradients(lambda gradient: -gradient)
    update.train()
    assert not [one for one in certify(update.run).problems if "logprob" not in one]
    assert update.found() == retrain(update.run, [STEP])
    assert learning_rate(0, 1.0, update.optimizer._config, 1) == 1.0
