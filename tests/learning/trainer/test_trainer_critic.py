"""PPO's critic, KL in the reward, and proximal logprobs, in whole training steps on toy models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_toys import Batch, hf_logprobs, make_experiences, make_model, plain_copy, record

from sharpen.config.run import LossConfig
from sharpen.config.trainer import CriticConfig, TrainerConfig
from sharpen.errors import CheckpointError, TrainingError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer import checkpoint
from sharpen.learning.trainer.critic import Critic
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer
from sharpen.learning.trainer.work import Part

PLAIN = LossConfig(kl="none")
ANY = Tolerance(mean=None, max=None)


class Counting(TrainedModel):
    """Counts its forward passes."""

    passes = 0

    def score(self, pack, **asked):
        self.passes += 1
        return super().score(pack, **asked)


def make_critic(module, config, *, rate=0.01, **settings):
    return Critic(
        TrainedModel(module, compute_dtype=module.dtype),
        config=CriticConfig(learning_rate=rate, **settings),
        trainer_config=config,
        planned_updates=10,
    )


def make_trainer(name="ppo", *, loss=PLAIN, seed=0, rate=0.003, critic_rate=0.01, dtype=torch.float64, **config):
    algorithm = resolve(name, loss, 8)
    settings = TrainerConfig(**{"max_tokens_per_micro_batch": 80, **config})
    reference = None
    if algorithm.needs_reference:
        reference = TrainedModel(make_model("qwen3", dtype, seed=1), compute_dtype=dtype)
        reference.freeze()
    return Trainer(
        Counting(make_model("qwen3", dtype, seed), compute_dtype=dtype),
        algorithm=algorithm,
        config=settings,
        learning_rate=rate,
        planned_updates=10,
        reference=reference,
        critic=make_critic(make_model("qwen3", dtype, seed), settings, rate=critic_rate)
        if algorithm.needs_critic
        else None,
        tolerance=ANY,
    )


def with_rewards(experiences):
    """As drawn for a critic: the first call of each rollout has no reward, the second one of its own."""
    rewards = np.linspace(-1.0, 1.0, len(experiences)).astype(np.float32)
    return [
        replace(experience, advantages_T=np.where(experience.calls_T == 1, reward, np.float32(0)))
        for experience, reward in zip(experiences, rewards, strict=True)
    ]


def batch_of(experiences):
    return Batch(experiences=tuple(experiences))


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}


def token_advantages(experiences, gamma, lam):
    """By the definition, with values of 0: for each experience its loss tokens' advantages, whitened over all."""
    found = []
    for experience in experiences:
        calls = experience.calls_T[experience.loss_mask_T]
        last = np.append(calls[1:] != calls[:-1], [True])
        rewards = np.where(last, experience.advantages_T[experience.loss_mask_T].astype(np.float64), 0.0)
        found.append(
            [sum((gamma * lam) ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
        )
    every = np.array([a for one in found for a in one])
    mean, deviation = every.mean(), np.sqrt(every.var() + 1e-8)
    return [(np.array(one) - mean) / deviation for one in found]


def test_the_first_update_is_the_policy_gradient_with_gae_of_a_critic_that_knows_nothing():
    """Computed here by plain transformers and the definition. Red when the reward arrives at every token of a call."""
    trainer = make_trainer(rate=1e-3, eps=1e-3)
    twin = plain_copy(make_model("qwen3"))
    experiences = with_rewards(record(twin, make_experiences()))
    for experience, advantages in zip(experiences, token_advantages(experiences, 1.0, 0.95), strict=True):
        weights = torch.from_numpy(experience.weights_T[experience.loss_mask_T] * advantages).double()
        (-weights * hf_logprobs(twin, experience)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    metrics = trainer.train_step([batch_of(experiences)])
    assert metrics.values["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics.values["explained_variance"] == pytest.approx(0.0)
    assert metrics.values["value_mean"] == 0.0
    # With values of 0 and lambda 0.95 the returns are the advantages before whitening.
    lengths = [int(e.loss_mask_T.sum()) for e in experiences]
    returns = np.concatenate(
        [
            [e.advantages_T[e.calls_T == 1][0] * 0.95 ** (n - 1 - t) for t in range(n)]
            for e, n in zip(experiences, lengths, strict=True)
        ]
    )
    # old and new values are both 0: no clip
    assert metrics.values["value_loss"] == pytest.approx(float(np.mean(returns**2)) / 2, rel=1e-5)
    assert metrics.values["return_mean"] == pytest.approx(float(returns.mean()), rel=1e-4)


def test_values_and_their_gradients_are_those_of_plain_transformers():
    experiences = record(plain_copy(make_model("qwen3")), make_experiences())
    module = make_model("qwen3")
    twin = plain_copy(module)
    critic = make_critic(module, TrainerConfig(), value_clip=None)
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(1, 32, generator=generator, dtype=torch.float64)
    parameters = dict(critic.parameters())
    with torch.no_grad():
        parameters["value_head.weight"].copy_(head)
        parameters["value_head.bias"].fill_(0.5)
    expected = []
    total = sum(int(e.loss_mask_T.sum()) for e in experiences)
    for experience in experiences:
        states = twin.model(input_ids=torch.from_numpy(experience.ids_T.astype(np.int64))[None]).last_hidden_state[0]
        values = states[np.flatnonzero(experience.loss_mask_T) - 1] @ head[0] + 0.5
        (0.5 * (values - 2.0).square().sum() / total).backward()
        expected.append(values.detach())
    packs = pack(experiences, 80)
    assert len(packs) > 1
    found = [critic.values(part).detach() for part in packs]
    seen = zip(packs, found, strict=True)
    critic.backward([Part(pack=part, values_E=0 * values, returns_E=0 * values + 2.0) for part, values in seen])
    by_token = {
        (p.rollout_ids[r], int(t)): v
        for p, values in zip(packs, found, strict=True)
        for r, t, v in zip(p.rollouts_E, p.tokens_E, values.tolist(), strict=True)
    }
    for experience, values in zip(experiences, expected, strict=True):
        places = np.flatnonzero(experience.loss_mask_T).tolist()
        assert [by_token[experience.rollout_id, place] for place in places] == pytest.approx(values.tolist(), rel=1e-6)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(parameters[name].grad, parameter.grad, atol=1e-5, rtol=1e-4)  # norms compute in fp32


def test_the_split_into_micro_batches_changes_nothing():
    experiences = with_rewards(record(plain_copy(make_model("qwen3")), make_experiences()))
    results = []
    for most in (60, 100_000):
        trainer = make_trainer(max_tokens_per_micro_batch=most)
        for _ in range(2):
            metrics = trainer.train_step([batch_of(experiences)])
        results.append((weights_of(trainer), metrics.values))
    for name, tensor in results[0][0].items():
        torch.testing.assert_close(tensor, results[1][0][name], atol=1e-7, rtol=1e-6)
    for name in ("value_loss", "explained_variance", "critic_grad_norm"):
        assert results[0][1][name] == pytest.approx(results[1][1][name], rel=1e-5)


def test_the_critic_learns_the_returns():
    """The same rollouts again and again: their returns become explained, and the loss falls."""
    experiences = with_rewards(record(plain_copy(make_model("qwen3")), make_experiences()))
    trainer = make_trainer(rate=0.0, critic_rate=0.01)
    metrics = [trainer.train_step([batch_of(experiences)]).values for _ in range(25)]
    assert metrics[0]["explained_variance"] == pytest.approx(0.0)
    assert metrics[-1]["explained_variance"] > 0.8
    assert metrics[-1]["value_loss"] < 0.3 * metrics[0]["value_loss"]


def test_a_resumed_critic_continues_identically(tmp_path):
    """Red when `Trainer.restore` leaves the critic, or its optimizer, as it was made."""
    experiences = with_rewards(record(plain_copy(make_model("qwen3")), make_experiences()))
    trainer = make_trainer(dtype=torch.float32)
    trainer.train_step([batch_of(experiences)])
    trainer.save(tmp_path / "global_step_1", {"step": 1})
    resumed = make_trainer(dtype=torch.float32, seed=3)
    assert resumed.restore(tmp_path / "global_step_1") == {"step": 1}
    first, second = (one.train_step([batch_of(experiences)]) for one in (trainer, resumed))
    names = ("value_loss", "explained_variance", "value_mean", "critic_grad_norm", "grad_norm")
    assert [second.values[name] for name in names] == [first.values[name] for name in names]
    for number, one in enumerate((trainer, resumed)):
        one.save(tmp_path / str(number), {})
    critics = [checkpoint.load(tmp_path / str(number)).further["critic"] for number in range(2)]
    assert all(torch.equal(tensor, critics[1][name]) for name, tensor in critics[0].items())


def test_a_checkpoint_without_a_critic_is_refused(tmp_path):
    make_trainer("multi_step_grpo", dtype=torch.float32).save(tmp_path / "global_step_1", {})
    trainer = make_trainer(dtype=torch.float32)
    before = weights_of(trainer)
    with pytest.raises(CheckpointError, match="holds no critic"):
        trainer.restore(tmp_path / "global_step_1")
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_tensors().items())


def test_a_critic_whose_gradient_is_not_finite_stops_the_update_of_both():
    """Red when the policy's optimizer steps before `Critic.check`."""
    experiences = with_rewards(record(plain_copy(make_model("qwen3", torch.float32)), make_experiences()))
    huge = [replace(e, advantages_T=e.advantages_T * np.float32(1e38)) for e in experiences]
    trainer = make_trainer(dtype=torch.float32)
    before = weights_of(trainer)
    with pytest.raises(TrainingError, match="critic: update 0"):
        trainer.train_step([batch_of(huge)])
    assert trainer.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_tensors().items())


def test_untied_output_embeddings_are_not_trained():
    critic = make_critic(make_model("llama"), TrainerConfig())
    names = [name for name, _ in critic.parameters()]
    assert "lm_head.weight" not in names
    assert {"model.embed_tokens.weight", "value_head.weight", "value_head.bias"} <= set(names)


def test_kl_in_the_reward_is_charged_from_each_token_to_the_end():
    """The gradient of grpo with k1 in the reward, by plain transformers: advantage minus what is still to come."""
    trainer = make_trainer("multi_step_grpo", loss=LossConfig(kl="k1", kl_coef=0.3, kl_in="reward"))
    reference = plain_copy(make_model("qwen3", seed=1))
    twin = plain_copy(make_model("qwen3"))
    experiences = record(twin, make_experiences())
    divergences = []
    for experience in experiences:
        mask = experience.loss_mask_T
        kl = experience.logprobs_T[mask] - hf_logprobs(reference, experience).detach().numpy()
        divergences.append(kl)
        charged = [0.3 * sum(kl[t:]) for t in range(len(kl))]
        advantages = experience.advantages_T[mask] - np.array(charged)
        weights = torch.from_numpy(experience.weights_T[mask] * advantages).double()
        (-weights * hf_logprobs(twin, experience)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    metrics = trainer.train_step([batch_of(experiences)]).values
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["kl_penalty"] == pytest.approx(0.3 * float(np.concatenate(divergences).mean()), rel=1e-4)
    assert "kl_loss" not in metrics


def test_ppo_takes_the_penalty_from_the_reward_of_each_token():
    """Lambda 1 and no whitening: advantages are the sums of rewards to the end, which is what grpo's are charged."""
    loss = {"kl": "k2", "kl_coef": 0.3, "kl_in": "reward"}
    experiences = with_rewards(record(plain_copy(make_model("qwen3")), make_experiences()))
    ppo = make_trainer(loss=LossConfig(**loss, advantage_args={"lam": 1.0, "whiten": False}))
    found = ppo.train_step([batch_of(experiences)]).values
    # The same advantages for grpo: the rollout's reward for both calls
    same = [
        replace(e, advantages_T=np.where(e.loss_mask_T, e.advantages_T[e.calls_T == 1][0], 0).astype(np.float32))
        for e in experiences
    ]
    grpo = make_trainer("multi_step_grpo", loss=LossConfig(**loss)).train_step([batch_of(same)]).values
    assert found["grad_norm"] == pytest.approx(grpo["grad_norm"], rel=1e-5)
    assert found["kl_penalty"] == pytest.approx(grpo["kl_penalty"])


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_an_adapted_coefficient_is_used_and_resumed(place, tmp_path):
    """A target far below what is found: 1.2 times after a step of as many rollouts as the horizon."""
    loss = LossConfig(kl="k2", kl_coef=0.1, kl_in=place, kl_target=1e-6, kl_horizon=9)
    trainer = make_trainer("multi_step_grpo", loss=loss, dtype=torch.float32)
    experiences = record(plain_copy(make_model("qwen3", torch.float32)), make_experiences())
    used = [trainer.train_step([batch_of(experiences)]).values["kl_coef"] for _ in range(2)]
    assert used == pytest.approx([0.1, 0.12])
    trainer.save(tmp_path / "global_step_2", {})
    resumed = make_trainer("multi_step_grpo", loss=loss, dtype=torch.float32)
    resumed.restore(tmp_path / "global_step_2")
    assert resumed.train_step([batch_of(experiences)]).values["kl_coef"] == pytest.approx(0.144)
    fixed = make_trainer("multi_step_grpo", loss=LossConfig(kl="k2", kl_coef=0.1), dtype=torch.float32)
    assert "kl_coef" not in fixed.train_step([batch_of(experiences)]).values


def halves(experiences):
    return [batch_of(experiences[:6]), batch_of(experiences[6:])]


@pytest.mark.parametrize(("epochs", "behaviour", "extra"), [(1, "none", 0), (1, "truncated", 0), (3, "truncated", 0)])
def test_one_minibatch_needs_no_further_forward_pass(epochs, behaviour, extra):
    loss = LossConfig(kl="none", behaviour=behaviour)
    trainer = make_trainer("multi_step_grpo", loss=loss, epochs=epochs, max_tokens_per_micro_batch=10_000)
    experiences = record(plain_copy(make_model("qwen3")), make_experiences())
    trainer.train_step([batch_of(experiences)])
    assert trainer.policy.passes == epochs + extra


def test_a_later_minibatch_is_held_against_the_weights_before_the_step():
    """One further pass for the second of two minibatches; its clip is about the distance from the step's start, its
    weight about the record. Red when the proximal logprobs are those of the minibatch's own update."""
    loss = LossConfig(kl="none", behaviour="plain", clip_low=0.0, clip_high=0.0)
    trainer = make_trainer("multi_step_grpo", loss=loss, rate=0.01, max_tokens_per_micro_batch=10_000)
    stale = record(plain_copy(make_model("qwen3")), make_experiences(temperatures=(1.0, 1.0)))
    stale = [replace(e, logprobs_T=np.where(e.loss_mask_T, e.logprobs_T - np.float32(0.1), 0)) for e in stale]
    metrics = trainer.train_step(halves(stale)).values
    assert trainer.policy.passes == 3
    # Recorded 0.1 below: every weight is exp(0.1), at the first update and at the second.
    assert metrics["behaviour_weight_mean"] == pytest.approx(np.exp(0.1), rel=1e-5)
    # Without room about 1 a clip holds what the first update moved already in its direction; in the first, nothing.
    assert 0.05 < metrics["clip_fraction"] < 0.5


def test_epochs_are_held_against_the_first_epochs_start():
    loss = LossConfig(kl="none", behaviour="plain", clip_low=0.0, clip_high=0.0)
    fractions = []
    for epochs in (1, 2):
        trainer = make_trainer("multi_step_grpo", loss=loss, rate=0.01, epochs=epochs)
        experiences = record(plain_copy(make_model("qwen3")), make_experiences())
        fractions.append(trainer.train_step([batch_of(experiences)]).values["clip_fraction"])
    assert fractions[0] == 0.0
    assert fractions[1] > 0.1


def test_a_critic_from_a_directory_in_bfloat16_with_recomputed_activations(toy_model_dir):
    """Weights and head stay fp32, values are near those of fp32, and a step updates them."""
    config = TrainerConfig(dtype="bfloat16", gradient_checkpointing=True, max_tokens_per_micro_batch=200)
    algorithm = resolve("ppo", PLAIN, 1)
    plan = TrainerPlan(
        model_path=toy_model_dir,
        algorithm=algorithm,
        config=config,
        learning_rate=1e-3,
        planned_updates=3,
        critic=CriticConfig(learning_rate=1e-3),
    )
    trainer = Trainer.load(plan, "cpu", tolerance=ANY)
    experiences = with_rewards(make_experiences())
    metrics = [trainer.train_step([batch_of(experiences)]).values for _ in range(2)]
    assert metrics[0]["value_mean"] == 0.0
    assert metrics[1]["value_mean"] != 0.0
    assert all(np.isfinite(one["value_loss"]) and one["critic_grad_norm"] > 0 for one in metrics)
    critics = [
        Critic.load(
            toy_model_dir,
            config=CriticConfig(),
            trainer_config=TrainerConfig(dtype=dtype),
            planned_updates=1,
            device=torch.device("cpu"),
        )
        for dtype in ("float32", "bfloat16")
    ]
    (part,) = pack(experiences, 10_000)
    values = []
    for critic in critics:
        with torch.no_grad():
            dict(critic.parameters())["value_head.weight"].fill_(0.05)
            values.append(critic.values(part))
    assert all(found.dtype == torch.float32 for found in values)
    torch.testing.assert_close(values[0], values[1], atol=0.05, rtol=0.05)
    assert not torch.equal(values[0], values[1])
