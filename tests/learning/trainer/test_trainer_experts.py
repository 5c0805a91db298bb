"""Training a mixture of experts: the engine's experts are replayed in every pass of the policy, and only there
(TRAPS 30)."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from expert_toys import TRAINED, copy_of, make_experts
from safetensors import safe_open
from trainer_toys import VOCABULARY, Batch, hf_logprobs, make_experiences
from transformers import AutoModelForCausalLM

from sharpen.config.run import LossConfig
from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import ParityError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.reference import WithoutAdapters
from sharpen.learning.trainer.trainer import Trainer
from sharpen.models.routing import Routing, to_array
from sharpen.placement.probe import sample_probes


def with_routes(module, experiences, shift=0):
    """Add the experts that the model chooses for each sequence; with a `shift`, others, as an engine of other weights
    would. A shared beginning gets the same ones."""
    model = copy_of(module)
    routing, found = Routing(model), []
    for one in experiences:
        with torch.no_grad(), routing.recording() as recorded:
            model(input_ids=torch.from_numpy(one.ids_T[:-1].astype(np.int64))[None], use_cache=False)
            routes_NLK = (recorded.routes_NLK + shift) % routing.shape.num_experts
        found.append(replace(one, routes_NLK=to_array(routes_NLK, routing.shape)))
    return found


def alone(module, experiences):
    """Logprobs and gradients by transformers, one sequence at a time, with the recorded experts."""
    model = copy_of(module)
    routing, logprobs = Routing(model), {}
    for one in experiences:
        routes_NLK = torch.from_numpy(one.routes_NLK.astype(np.int64))
        with routing.replaying(torch.cat([routes_NLK, routes_NLK[-1:]])):
            scored = hf_logprobs(model, one)
        factor = torch.from_numpy((one.advantages_T * one.weights_T)[one.loss_mask_T])
        (factor * scored).sum().backward()
        logprobs |= dict(
            zip([(one.rollout_id, t) for t in np.flatnonzero(one.loss_mask_T)], scored.tolist(), strict=True)
        )
    return {name: p.grad for name, p in model.named_parameters()}, logprobs


@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_packed_tree_replays_each_tokens_experts_and_has_the_gradients_of_separate_sequences(family, checkpointing):
    """With experts that the model itself would not choose. Break: give `_hidden_of` no routes."""
    module = make_experts(family)
    experiences = with_routes(module, make_experiences(num_groups=2), shift=3)
    gradients, logprobs = alone(module, experiences)
    trained = TrainedModel(module, compute_dtype=torch.float32, gradient_checkpointing=checkpointing)
    found = {}
    for packed in pack(experiences, 10_000, min_shared_tokens=4):
        assert packed.num_rerouted_tokens == 0
        assert packed.num_computed_tokens < packed.num_sequence_tokens
        logprobs_E = trained.score(packed).logprobs_E
        (torch.from_numpy(packed.advantages_E * packed.weights_E) * logprobs_E).sum().backward()
        names = [(packed.rollout_ids[r], t) for r, t in zip(packed.rollouts_E, packed.tokens_E, strict=True)]
        found |= dict(zip(names, logprobs_E.tolist(), strict=True))
    assert found == pytest.approx(logprobs, abs=1e-5)
    for name, parameter in trained.parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=2e-5, rtol=1e-3)


def test_a_shared_token_is_computed_with_the_first_sequences_experts_and_what_differs_is_counted():
    first, second = make_experiences(num_groups=1, group_size=2)
    shared = int(np.argmax(first.loss_mask_T))
    routes = np.zeros((len(first.ids_T) - 1, 2, 2), np.uint8)
    others = np.zeros((len(second.ids_T) - 1, 2, 2), np.uint8)
    others[3, 1] = (4, 5)
    (packed,) = pack([replace(first, routes_NLK=routes), replace(second, routes_NLK=others)], 1000)
    assert shared > 3
    assert packed.num_rerouted_tokens == 1
    assert not packed.routes_NLK.any()
    of_second = packed.rollouts_E == packed.rollout_ids.index(second.rollout_id)
    np.testing.assert_array_equal(packed.comparable_E(0), ~of_second)


def sampled_by_engine(module, count=6):
    """Rollouts of one engine: prompts of one beginning, with advantages."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, VOCABULARY, 20)
    prompts = [np.concatenate([common, rng.integers(3, VOCABULARY, 3)]).astype(np.int32) for _ in range(count)]

    async def sample():
        engine = EmbeddedEngine(copy_of(module), max_model_len=64)
        asked = [sample_probes(engine, ids, temperature=1.0, noise=number) for number, ids in enumerate(prompts)]
        found = await asyncio.gather(*asked)
        await engine.close()
        return [one for (one,) in found]

    experiences = []
    for number, one in enumerate(asyncio.run(sample())):
        advantages_T = np.where(one.loss_mask_T, np.float32((-1.0) ** number), np.float32(0))
        experiences.append(
            replace(
                one,
                rollout_id=f"g/{number}",
                group_id="g",
                advantages_T=advantages_T,
                weights_T=np.where(one.loss_mask_T, 0.01, 0).astype(np.float32),
            )
        )
    return experiences


def make_trainer(policy):
    algorithm = resolve("multi_step_grpo", LossConfig(kl="none"), 8)
    return Trainer(policy, algorithm=algorithm, config=TrainerConfig(), learning_rate=0.01, planned_updates=4)


@pytest.mark.parametrize("family", TRAINED)
def test_a_step_on_what_the_engine_sampled_agrees_with_it_and_moves_the_routers(family):
    module = make_experts(family)
    experiences = sampled_by_engine(module)
    policy = TrainedModel(module, compute_dtype=torch.float32)
    routers = {n: p.detach().clone() for n, p in policy.parameters() if n.endswith(("gate.weight", "router.weight"))}
    metrics = make_trainer(policy).train_step([Batch(experiences=tuple(experiences))])
    assert metrics.values["logprob_gap_max"] < 1e-4
    assert metrics.values["logprob_gap_tokens"] == sum(int(one.loss_mask_T.sum()) for one in experiences)
    assert metrics.values["rerouted_tokens"] == 0
    assert routers
    assert any(not torch.equal(dict(policy.parameters())[name], before) for name, before in routers.items())


def test_trap_30_without_replay_other_experts_would_be_trained():
    """What the engine chose is not what the trainer would choose (as after rounding, or an update on the way): with
    replay the logprobs agree. Break: set `replays` to False."""
    module = make_experts("qwen3_moe")
    (experience,) = with_routes(module, make_experiences(num_groups=1, group_size=1), shift=1)
    trained = TrainedModel(module, compute_dtype=torch.float32)
    (packed,) = pack([experience], 1000)
    with torch.no_grad():
        replayed_E = trained.score(packed).logprobs_E
        trained.replays = False
        own_E = trained.score(packed).logprobs_E
    assert float((replayed_E - own_E).abs().max()) > 0.01


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda routes: None, "no experts"),
        (lambda routes: routes[:-1], "experts of the shape"),
        (lambda routes: routes[:, :1], "experts of the shape"),
        (lambda routes: routes + np.uint8(8), "below 8"),
    ],
)
def test_an_engine_without_usable_routing_is_refused_before_anything_is_trained(change, says):
    module = make_experts("qwen3_moe")
    experiences = sampled_by_engine(module, count=2)
    broken = replace(experiences[1], routes_NLK=change(experiences[1].routes_NLK))
    trainer = make_trainer(TrainedModel(module, compute_dtype=torch.float32))
    with pytest.raises(ParityError, match=says) as raised:
        trainer.train_step([Batch(experiences=(experiences[0], broken))])
    assert "g/1" in str(raised.value)
    assert trainer.version == 0


def test_a_reference_chooses_by_itself():
    """A frozen copy, and the policy without its adapters. Break: let `freeze` or `switched_off` leave `replays`."""
    module = make_experts("qwen3_moe")
    (experience,) = with_routes(module, make_experiences(num_groups=1, group_size=1), shift=1)
    (packed,) = pack([experience], 1000)
    own_E = hf_logprobs(copy_of(module), experience).detach()
    reference = TrainedModel(copy_of(module), compute_dtype=torch.float32)
    reference.freeze()
    with torch.no_grad():
        torch.testing.assert_close(reference.score(packed).logprobs_E, own_E, atol=1e-5, rtol=1e-5)
    adapted = AdaptedModel(module, lora=LoraConfig(rank=2), compute_dtype=torch.float32)
    scored_E = WithoutAdapters(adapted).score(packed).logprobs_E
    torch.testing.assert_close(scored_E, own_E, atol=1e-5, rtol=1e-5)
    assert adapted.replays


def test_under_lora_routers_and_experts_are_frozen():
    adapted = AdaptedModel(make_experts("qwen3_moe"), lora=LoraConfig(rank=2), compute_dtype=torch.float32)
    assert adapted.adapters["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert all("lora_" in name for name, _ in adapted.parameters())


def test_a_checkpoint_is_loaded_by_transformers_expert_by_expert(tmp_path):
    """In memory all experts of a layer are one tensor; in the files each has its own, as in the published ones."""
    module = make_experts("qwen3_moe")
    trained = TrainedModel(module, compute_dtype=torch.float32)
    trained.write(tmp_path, trained.checkpoint_parts())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.7.gate_proj.weight" in file.keys()  # noqa: SIM118 (not a mapping)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name]), name


@pytest.mark.parametrize("family", TRAINED)
def test_under_autocast_experts_compute_with_rounded_weights_like_other_layers(family):
    """transformers' product of all experts at once is not autocast's business: without `round_experts` it is of whole
    weights. Gradients arrive in fp32."""
    module = make_experts(family)
    (packed,) = pack(with_routes(module, make_experiences(num_groups=1)), 10_000)
    trained = TrainedModel(copy_of(module), compute_dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "experts" in name and parameter.dim() == 3:
                parameter.copy_(parameter.bfloat16())
    rounded = TrainedModel(copy_of(module), compute_dtype=torch.bfloat16)
    logprobs_E = trained.score(packed).logprobs_E
    assert torch.equal(logprobs_E, rounded.score(packed).logprobs_E)
    logprobs_E.sum().backward()
    (weight,) = [p for n, p in trained.parameters() if n.endswith("layers.1.mlp.experts.down_proj")] or [None]
    assert weight is None or (weight.grad.dtype == torch.float32 and weight.grad.abs().sum() > 0)
