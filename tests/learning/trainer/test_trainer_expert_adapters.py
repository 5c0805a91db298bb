"""LoRA on the experts themselves, whose weights are one tensor for each projection of a layer."""

import asyncio

import numpy as np
import pytest
import torch
from expert_toys import TRAINED, copy_of, make_experts
from safetensors.torch import load_file
from test_trainer_experts import make_trainer, sampled_by_engine, with_routes
from toy_engines import request
from trainer_toys import Batch, hf_logprobs, make_experiences
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sharpen.config.trainer import LoraConfig
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import ConfigError
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.reference import WithoutAdapters
from sharpen.models.experts import experts_of
from sharpen.models.routing import Routing
from sharpen.models.table import family_of
from sharpen.placement.trainers import publish_unmerged_adapters

LORA = LoraConfig(rank=2, alpha=4, experts=True)


def adapt(module, dtype=torch.float32, lora=LORA, **settings):
    """A model whose adapters have an effect."""
    torch.manual_seed(3)
    policy = AdaptedModel(module, lora=lora, compute_dtype=dtype, **settings)
    with torch.no_grad():
        for name, parameter in policy.parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return policy


def merged_copy(policy, module):
    twin = copy_of(module)
    twin.load_state_dict(policy.state_tensors(), strict=False)
    return twin


@pytest.mark.parametrize("family", TRAINED)
def test_adapters_of_experts_equal_merged_weights_and_train_by_the_chain_rule(family):
    """With W' = W + s B A and G the gradient of W', that of B is s G A^T and that of A is s B^T G, for each expert."""
    module = make_experts(family)
    (experience,) = with_routes(module, make_experiences(num_groups=1, group_size=1), shift=1)
    (packed,) = pack([experience], 1000)
    policy = adapt(copy_of(module), gradient_checkpointing=True)
    twin = merged_copy(policy, module)
    routes_NLK = torch.from_numpy(experience.routes_NLK.astype(np.int64))
    with Routing(twin).replaying(torch.cat([routes_NLK, routes_NLK[-1:]])):
        expected_E = hf_logprobs(twin, experience)
    logprobs_E = policy.score(packed).logprobs_E
    torch.testing.assert_close(logprobs_E, expected_E, atol=1e-5, rtol=0)
    logprobs_E.sum().backward()
    expected_E.sum().backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for target in policy.adapters["target_parameters"]:
        layer = adapter_of(policy, target)
        a_XRI = layer.lora_A["default"].weight.unflatten(0, (8, 2)).detach()
        b_XOR = by_expert(layer.lora_B["default"].weight).detach()
        gradient_XOI = gradients[target].transpose(1, 2) if family == "gpt_oss" else gradients[target]
        found_XOR = by_expert(layer.lora_B["default"].weight.grad)
        torch.testing.assert_close(found_XOR, 2.0 * gradient_XOI @ a_XRI.transpose(1, 2), atol=1e-5, rtol=1e-4)
        found_XRI = layer.lora_A["default"].weight.grad.unflatten(0, (8, 2))
        torch.testing.assert_close(found_XRI, 2.0 * b_XOR.transpose(1, 2) @ gradient_XOI, atol=1e-5, rtol=1e-4)
    assert all("lora_" in name and ".gate." not in name and "router" not in name for name, _ in policy.parameters())


def adapter_of(policy, target):
    """The layer that adapts a weight of experts; peft puts those of one part into each other."""
    owner, _, weight = target.rpartition(".")
    (layer,) = [
        layer
        for name, layer in policy.module.named_modules()
        if getattr(layer, "parameter_name", "") == weight and name.replace(".base_layer", "") == owner
    ]
    return layer


def by_expert(up_ORX):
    return up_ORX.unflatten(1, (2, 8)).permute(2, 0, 1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 on transformers 5.23
def test_a_checkpoint_is_a_plain_mixture_and_an_adapter_of_peft(tmp_path):
    from peft import PeftModel

    module = make_experts("qwen3_moe")
    module.save_pretrained(tmp_path / "first")
    policy = adapt(module)
    policy.write(tmp_path, policy.checkpoint_parts())
    policy.write_trained(tmp_path, dict(policy.parameters()))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        first = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32)
        before = first(input_ids=ids).logits
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(first, tmp_path / "adapter")(input_ids=ids).logits
    assert (plain - before).abs().max() > 1e-2
    torch.testing.assert_close(adapted, plain, atol=1e-5, rtol=0)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(load_file(tmp_path / "first" / "model.safetensors"))


def test_a_step_agrees_with_the_engine_and_without_its_adapters_it_is_the_model_before():
    module = make_experts("qwen3_moe")
    experiences = sampled_by_engine(module)
    policy = AdaptedModel(copy_of(module), lora=LORA, compute_dtype=torch.float32)
    metrics = make_trainer(policy).train_step([Batch(experiences=tuple(experiences))])
    assert metrics.values["logprob_gap_max"] < 1e-4
    moved = {name.split(".")[-1]: tensor for name, tensor in policy.state_tensors().items()}
    assert "down_proj" in moved
    (packed,) = pack(experiences[:1], 1000)
    before_E = TrainedModel(copy_of(module), compute_dtype=torch.float32).score(packed).logprobs_E
    assert (policy.score(packed).logprobs_E - before_E).abs().max() > 1e-4
    torch.testing.assert_close(WithoutAdapters(policy).score(packed).logprobs_E, before_E, atol=1e-5, rtol=0)


def test_in_bfloat16_frozen_experts_are_rounded_once_and_the_engines_weights_are_the_trainers():
    """Kept as autocast would round them: nothing changes but the memory. In float32 they compute whole."""
    module = make_experts("qwen3_moe")
    (packed,) = pack(with_routes(module, make_experiences(num_groups=1, group_size=1)), 1000)
    frozen = TrainedModel(copy_of(module), compute_dtype=torch.bfloat16)
    whole_E = frozen.score(packed).logprobs_E
    frozen.freeze()
    frozen.replays = True
    experts = frozen.module.model.layers[0].mlp.experts
    assert {weight.dtype for weight in experts.parameters()} == {torch.bfloat16}
    assert torch.equal(frozen.score(packed).logprobs_E, whole_E)
    policy = adapt(copy_of(module), torch.bfloat16)
    (outer,) = [layer for name, layer in policy._layers.items() if name == "model.layers.0.mlp.experts"]
    assert outer.get_param().dtype == torch.bfloat16
    assert outer.lora_A["default"].weight.dtype == torch.float32
    assert policy.state_tensors()["model.layers.0.mlp.experts.down_proj"].dtype == torch.bfloat16
    twin = TrainedModel(merged_copy(policy, module), compute_dtype=torch.bfloat16)
    assert (policy.score(packed).logprobs_E - twin.score(packed).logprobs_E).abs().mean() < 0.02
    with torch.no_grad(), policy.computing_in(torch.float32), twin.computing_in(torch.float32):
        torch.testing.assert_close(policy.score(packed).logprobs_E, twin.score(packed).logprobs_E, atol=0.02, rtol=0)


@pytest.mark.parametrize("adapted", [True, False])
def test_one_copy_of_the_experts_for_engine_and_trainer(adapted):
    lora = LORA.model_copy(update={"base": "shared", "experts": adapted})
    module = make_experts("qwen3_moe")
    policy = AdaptedModel(copy_of(module), lora=lora, compute_dtype=torch.float32)
    engine = EmbeddedEngine(copy_of(module), max_model_len=64, kv_cache_mb=8, adapters=lora)

    class Holder:
        pass

    holder = Holder()
    holder.policy = policy
    assert publish_unmerged_adapters(engine, holder)
    served, mine = engine.experts(), experts_of(policy.module)
    assert len(mine) == 2
    for name, part in mine.items():
        assert part is not served[name]
        assert all(weight is getattr(served[name], key) for key, weight in part.named_parameters(recurse=False))
    with torch.no_grad():
        for name, parameter in policy.parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)

    async def sampled():
        await engine.load(1, policy.state_tensors())
        return await engine.generate(request(np.arange(3, 20, dtype=np.int32)))

    generation = asyncio.run(sampled())
    policy.alone = False
    twin = merged_copy(policy, module)
    ids = torch.from_numpy(np.concatenate([np.arange(3, 20), generation.ids])).long()
    with torch.no_grad():
        logprobs = twin(input_ids=ids[None]).logits[0].log_softmax(-1)
    at = torch.arange(16, len(ids) - 1)
    np.testing.assert_allclose(generation.logprobs, logprobs[at, ids[at + 1]].numpy(), atol=1e-4)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_next", "ernie4_5_moe"])
def test_experts_get_no_adapters_unasked(family):
    """peft takes `gate_proj` of a dense layer or a shared expert for that of all experts: those names are left out, and
    the table says so."""
    row = family_of(CONFIG_MAPPING[family]())
    assert any("gate_proj" in limit for limit in row.limits) or not row.listed
    policy = AdaptedModel(make_experts(family), lora=LoraConfig(rank=2), compute_dtype=torch.float32)
    assert not any("experts" in name for name, _ in policy.parameters())
    assert not {"gate_proj", "up_proj", "down_proj"} & set(policy.adapters["target_modules"])
    with pytest.raises(ConfigError, match="gate_proj"):
        AdaptedModel(make_experts(family), lora=LoraConfig(target_modules=("gate_proj",)), compute_dtype=torch.float32)


def test_a_dense_model_has_no_experts_to_adapt(toy_model_dir):
    with pytest.raises(ConfigError, match=r"trainer.lora.experts.*qwen3"):
        AdaptedModel(AutoModelForCausalLM.from_pretrained(toy_model_dir), lora=LORA, compute_dtype=torch.float32)
