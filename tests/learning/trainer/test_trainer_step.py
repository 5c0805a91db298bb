"""Training steps: what is updated, what is measured, what is refused before anything changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_toys import Batch, hf_logprobs, make_experience, make_experiences, make_model, plain_copy, record

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ParityError, TrainingError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.optimizer import GradientBlock
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.trainer import Trainer

PLAIN = LossConfig(kl="none")
ANY = Tolerance(mean=None, max=None)


def make_trainer(module, *, loss=PLAIN, reference=None, tolerance=None, rate=0.01, **config):
    algorithm = resolve("multi_step_grpo", loss, 8)
    return Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=algorithm,
        config=TrainerConfig(**{"max_tokens_per_micro_batch": 80, **config}),
        learning_rate=rate,
        planned_updates=10,
        reference=reference,
        tolerance=tolerance,
    )


def batch_of(experiences):
    return Batch(experiences=tuple(experiences))


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}


def test_a_step_reinforces_what_was_better():
    """Logprobs of positive advantage rise, those of negative fall, over a few steps on the same batch."""
    module = make_model("qwen3")
    experiences = record(plain_copy(module), make_experiences())
    trainer = make_trainer(module, rate=0.003, tolerance=ANY)
    for _ in range(3):
        trainer.train_step([batch_of(experiences)])
    assert trainer.version == 3
    after = plain_copy(module)
    gains = []
    for experience in experiences:
        mask = experience.loss_mask_T
        gain = hf_logprobs(after, experience).detach().numpy() - experience.logprobs_T[mask]
        gains.append(float((gain * experience.advantages_T[mask]).sum()))
    assert sum(gains) > 0.1


def test_the_first_update_is_adamw_on_the_weighted_policy_gradient():
    """At equal weights the ratio is 1, so the gradient is -sum(w A dlogprob), computed here by plain transformers."""
    module = make_model("llama")
    twin = plain_copy(module)
    experiences = record(twin, make_experiences())
    for experience in experiences:
        mask = experience.loss_mask_T
        factor = torch.from_numpy((experience.weights_T * experience.advantages_T)[mask]).double()
        (-factor * hf_logprobs(twin, experience)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    decayed = [p for p in twin.parameters() if p.ndim >= 2]
    rest = [p for p in twin.parameters() if p.ndim < 2]
    torch.optim.AdamW(
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.01, eps=1e-3
    ).step()
    trainer = make_trainer(module, rate=1e-3, eps=1e-3)
    metrics = trainer.train_step([batch_of(experiences)])
    assert metrics.values["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, tensor in trainer.state_tensors().items():
        torch.testing.assert_close(tensor, dict(twin.named_parameters())[name].detach(), atol=1e-7, rtol=1e-6)


def test_trap_06_tokens_outside_the_mask_have_no_gradient():
    """What a tool or user token *predicts* never matters: changing recorded values there changes nothing, and a token
    only the mask excludes gets no push. Break: in `_entries` use all tokens instead of `flatnonzero(loss_mask_T)`.
    """
    module = make_model("qwen3")
    experiences = record(plain_copy(module), make_experiences(num_groups=1))
    noisy = [
        replace(
            e,
            advantages_T=np.where(e.loss_mask_T, e.advantages_T, 5).astype(np.float32),
            weights_T=np.where(e.loss_mask_T, e.weights_T, 5).astype(np.float32),
        )
        for e in experiences
    ]
    results = []
    for batch in (experiences, noisy):
        trainer = make_trainer(make_model("qwen3"))
        metrics = trainer.train_step([batch_of(batch)])
        assert metrics.trained_tokens == sum(int(e.loss_mask_T.sum()) for e in experiences)
        results.append(weights_of(trainer))
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_trap_09_parity_is_measured_and_enforced_before_the_update():
    """One wrong recorded logprob stops the step, names its token, and changes no weight.

    Break: move `gap.check` behind the optimizer step in `Trainer._update`.
    """
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), make_experiences())
    trainer = make_trainer(module)
    good = trainer.train_step([batch_of(experiences)])
    assert good.values["logprob_gap_max"] < 1e-4
    assert good.values["logprob_gap_tokens"] == good.trained_tokens

    current = record(plain_copy(module), [replace(e, versions_T=np.where(e.loss_mask_T, 1, -1)) for e in experiences])
    logprobs_T = current[4].logprobs_T.copy()
    token = int(np.flatnonzero(current[4].calls_T == 1)[2])
    logprobs_T[token] += 0.05
    current[4] = replace(current[4], logprobs_T=logprobs_T)
    before = weights_of(trainer)
    with pytest.raises(ParityError, match=rf"policy version 1.*rollout g1/1, call 1, token {token} \(id"):
        trainer.train_step([batch_of(current)])
    assert trainer.version == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_tensors().items())


def test_trap_10_a_temperature_left_out_by_either_side_is_found():
    """Recorded at 0.7, declared as 1.0. Break: drop the temperature from `_score_chunk`."""
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), make_experiences(temperatures=(0.7, 0.7)))
    wrong = [replace(e, temperatures_T=np.ones_like(e.temperatures_T)) for e in experiences]
    trainer = make_trainer(module)
    with pytest.raises(ParityError):
        trainer.train_step([batch_of(wrong)])
    assert trainer.train_step([batch_of(experiences)]).values["logprob_gap_max"] < 1e-4


def test_gradients_do_not_outlive_their_update():
    """They are as large as the weights, and rollouts follow. Break: only `zero_grad` before the next update."""
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), make_experiences())
    trainer = make_trainer(module)
    assert trainer.train_step([batch_of(experiences)]).values["grad_norm"] > 0
    assert all(parameter.grad is None for parameter in module.parameters())
    with pytest.raises(ParityError):  # after the backward pass
        make_trainer(module).train_step(
            [batch_of([replace(one, logprobs_T=one.logprobs_T - 1) for one in experiences])]
        )
    assert all(parameter.grad is None for parameter in module.parameters())


def test_gradients_in_one_block_of_memory_are_the_same_ones():
    """Bit for bit, over several micro-batches; the memory of the block goes with the update. Red when a gradient that
    is added to later starts at another place, or when the block is kept."""
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), make_experiences())
    plain, blocked = (make_trainer(plain_copy(module), tolerance=ANY) for _ in range(2))
    optimizer = blocked._optimizer
    optimizer._block = GradientBlock(optimizer.parameters)
    places = set()
    for _, one in blocked.policy.parameters():
        one.register_post_accumulate_grad_hook(lambda one: places.add(one.grad.untyped_storage().data_ptr()))
    for _ in range(2):
        values = [trainer.train_step([batch_of(experiences)]).values for trainer in (plain, blocked)]
        assert values[0] == values[1]
        assert len(places) == 1
        assert optimizer._block._block is None
        places.clear()
    mine = weights_of(blocked)
    assert all(torch.equal(tensor, mine[name]) for name, tensor in weights_of(plain).items())


def test_tokens_of_older_versions_are_trained_but_not_compared():
    module = make_model("qwen3", torch.float32)
    experiences = make_experiences()  # logprobs of -1 everywhere, as if a much older model had sampled
    trainer = make_trainer(module)
    trainer.version = 3
    metrics = trainer.train_step([batch_of(experiences)])
    assert trainer.version == 4
    assert "logprob_gap_max" not in metrics.values


def test_trap_12_collapsed_importance_weights_raise_an_alarm():
    """Break: leave out `sample_share` from `_summarize`."""
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), make_experiences())
    fresh = make_trainer(module, rate=0.0).train_step([batch_of(experiences)])
    assert fresh.values["sample_share"] == pytest.approx(1.0, abs=1e-4)
    assert fresh.alarms == ()
    shifted = [
        replace(e, logprobs_T=e.logprobs_T - np.float32(0.4 * number) * e.loss_mask_T)
        for number, e in enumerate(experiences)
    ]
    stale = make_trainer(make_model("qwen3", torch.float32), tolerance=ANY).train_step([batch_of(shifted)])
    assert stale.values["sample_share"] < 0.3
    assert "collapsed" in stale.alarms[0]


@pytest.mark.parametrize("loss", [PLAIN, LossConfig(kl="k2", kl_coef=0.1, entropy_coef=0.05)])
def test_trap_19_an_update_does_not_depend_on_the_micro_batch_size(loss):
    """Weights after an update, KL and entropy included. Break: divide the loss in `_backward` by the pack's tokens."""
    results = []
    for max_tokens in (1, 60, 10_000):
        module = make_model("qwen3")
        experiences = record(plain_copy(module), make_experiences(num_groups=4))
        reference = None
        if loss.kl != "none":
            reference = TrainedModel(make_model("qwen3", seed=1), compute_dtype=torch.float64)
        trainer = make_trainer(module, loss=loss, reference=reference, eps=1e-3, max_tokens_per_micro_batch=max_tokens)
        metrics = trainer.train_step([batch_of(experiences)])
        results.append((weights_of(trainer), metrics))
    for weights, metrics in results[1:]:
        for name, tensor in results[0][0].items():
            torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=1e-6)
        for name, value in results[0][1].values.items():
            assert metrics.values[name] == pytest.approx(value, abs=1e-6)


def test_sequences_without_a_gradient_are_not_computed_and_change_nothing():
    """A third of the groups is flat: skipping them gives the same weights as computing them would."""
    module = make_model("qwen3")
    experiences = record(plain_copy(module), make_experiences())
    flat = [replace(e, advantages_T=np.zeros_like(e.advantages_T)) if e.group_id == "g1" else e for e in experiences]
    skipping = make_trainer(module)
    metrics = skipping.train_step([batch_of(flat)])
    assert metrics.skipped_tokens == sum(int(e.loss_mask_T.sum()) for e in experiences if e.group_id == "g1")
    computing = make_trainer(make_model("qwen3"))
    computing.train_step([batch_of([replace(e, advantages_T=e.advantages_T + np.float32(1e-30)) for e in flat])])
    for name, tensor in skipping.state_tensors().items():
        torch.testing.assert_close(tensor, computing.state_tensors()[name], atol=1e-9, rtol=1e-9)


def test_one_group_is_computed_for_parity_when_all_are_flat():
    module = make_model("qwen3", torch.float32)
    flat = [
        replace(e, advantages_T=np.zeros_like(e.advantages_T)) for e in record(plain_copy(module), make_experiences())
    ]
    metrics = make_trainer(module).train_step([batch_of(flat)])
    assert metrics.values["logprob_gap_max"] < 1e-4
    assert metrics.trained_tokens == sum(int(e.loss_mask_T.sum()) for e in flat if e.group_id == "g0")


def test_the_reference_stays_and_its_kl_is_reported():
    """The reference equals the policy at the start (KL 0) and not after an update; its weights never move."""
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), make_experiences())
    reference = TrainedModel(make_model("qwen3", torch.float32), compute_dtype=torch.float32)
    reference.freeze()
    trainer = make_trainer(module, loss=LossConfig(kl="k3", kl_coef=0.1), reference=reference, tolerance=ANY)
    first = trainer.train_step([batch_of(experiences)])
    second = trainer.train_step([batch_of(experiences)])
    assert first.values["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert second.values["kl_reference"] > 1e-5
    for name, tensor in make_model("qwen3", torch.float32).named_parameters():
        assert torch.equal(dict(reference.module.named_parameters())[name], tensor)


def test_epochs_and_minibatches_are_updates_of_their_own():
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), make_experiences(num_groups=4))
    trainer = make_trainer(module, epochs=2)
    metrics = trainer.train_step([batch_of(experiences[:6]), batch_of(experiences[6:])])
    assert (metrics.num_updates, metrics.version, trainer.version) == (4, 4, 4)
    assert metrics.values["logprob_gap_tokens"] == sum(int(e.loss_mask_T.sum()) for e in experiences[:6])
    assert trainer.train_step([batch_of([])]).num_updates == 0
    assert trainer.version == 4


def test_infinite_loss_is_refused_and_named():
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), make_experiences())
    experiences[0] = replace(
        experiences[0], weights_T=np.where(experiences[0].loss_mask_T, np.inf, 0).astype(np.float32)
    )
    trainer = make_trainer(module)
    before = weights_of(trainer)
    with pytest.raises(TrainingError, match="gradient values of"):
        trainer.train_step([batch_of(experiences)])
    assert trainer.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_tensors().items())


def test_one_token_rollout():
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), [make_experience("g0/0", [5, 6], [(1, 2)], advantage=1.0)])
    assert make_trainer(module).train_step([batch_of(experiences)]).computed_tokens == 1


@pytest.mark.gpu
def test_gpu_training_step():
    module = make_model("qwen3", torch.float32)
    experiences = record(plain_copy(module), make_experiences())
    trainer = make_trainer(module.cuda())
    assert trainer.train_step([batch_of(experiences)]).values["logprob_gap_max"] < 1e-3
