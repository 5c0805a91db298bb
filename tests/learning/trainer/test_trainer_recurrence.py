"""A pack's tree through recurrent and convolution layers equals one sequence at a time, in logprobs and gradients."""

import numpy as np
import pytest
import torch
from hybrid_toys import HYBRIDS, make_hybrid
from test_trainer_model import assert_same, own_loss, packed_loss
from trainer_toys import Batch, make_experience, make_experiences, plain_copy, record
from transformers import AutoModelForCausalLM

from sharpen.config.run import LossConfig
from sharpen.config.trainer import CriticConfig, LoraConfig, TrainerConfig
from sharpen.engine.weights import copy_weights
from sharpen.errors import ConfigError, ModelError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Segment
from sharpen.learning.trainer.recurrence import Calls
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer

CPU = torch.device("cpu")
KINDS = ("qwen3_5_text", "lfm2", "bamba", "jamba")
"""A gated delta net, a short convolution, Mamba 2, Mamba 1."""


def toys(**kind):
    return make_experiences(**{"num_groups": 2, "group_size": 2, **kind})


def trained(family, **settings):
    return TrainedModel(make_hybrid(family), **{"compute_dtype": torch.float32, **settings})


def segment(start, stop, parent, subtree_stop=None):
    return Segment(start=start, stop=stop, subtree_stop=subtree_stop or stop, parent=parent)


@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_equals_one_sequence_at_a_time(family):
    """Break: in `through_tree` take `{}` for `before`, or in `_members` let a segment of one token leave its state."""
    module = make_hybrid(family)
    expected = own_loss(plain_copy(module), toys())
    policy = TrainedModel(module, compute_dtype=torch.float32)
    assert_same(packed_loss(policy, toys(), min_shared=1), expected, 1e-4)


@pytest.mark.parametrize("family", KINDS)
def test_answers_of_two_tokens_leave_one_to_compute_behind_the_prompt(family):
    """Break: in `_call` leave out the second token of such calls: a single step changes the state in place."""
    prompt = list(range(5, 15))
    experiences = [
        make_experience(f"g/{first}", [*prompt, first, 7], [(10, 12)], advantage=float(first)) for first in (3, 4, 5)
    ]
    module = make_hybrid(family)
    expected = own_loss(plain_copy(module), experiences)
    assert_same(packed_loss(TrainedModel(module, compute_dtype=torch.float32), experiences), expected, 1e-4)


@pytest.mark.parametrize("family", KINDS)
def test_gradient_does_not_depend_on_micro_batches_order_or_sharing(family):
    policy = trained(family)
    expected = packed_loss(policy, toys())
    for settings in ({"max_tokens": 1}, {"max_tokens": 60}, {"min_shared": 1000}):
        assert_same(packed_loss(policy, toys(), **settings), expected, 1e-4)
    assert_same(packed_loss(policy, toys()[::-1]), expected, 1e-4)


@pytest.mark.parametrize("family", KINDS)
def test_gradient_checkpointing_computes_the_tree_again(family):
    expected = packed_loss(trained(family), toys())
    assert_same(packed_loss(trained(family, gradient_checkpointing=True), toys()), expected, 1e-5)


@pytest.mark.parametrize("family", KINDS)
def test_bfloat16_is_as_close_as_transformers_own(family):
    """Weights in fp32 and products in bfloat16, against a model that has all in bfloat16."""
    _, exact = own_loss(make_hybrid(family), toys())
    _, rounded = own_loss(make_hybrid(family, torch.bfloat16), toys())
    policy = trained(family, compute_dtype=torch.bfloat16)
    gradients, ours = packed_loss(policy, toys())
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}

    def gap(logprobs):
        return np.mean([abs(logprobs[key] - exact[key]) for key in exact])

    assert 0 < gap(ours) < 1.5 * gap(rounded)


def test_a_layer_that_forgets_is_noticed_when_the_model_is_loaded():
    module = make_hybrid("bamba")
    layer = module.model.layers[0].mamba
    own = layer.forward

    def forgets(hidden_states, cache_params=None, **kwargs):
        return own(hidden_states, cache_params=cache_params and type(cache_params)({}), **kwargs)

    layer.forward = forgets
    with pytest.raises(ModelError, match="bamba"):
        TrainedModel(module, compute_dtype=torch.float32)


def test_a_module_can_be_taken_over_twice():
    module = make_hybrid("bamba")
    expected = packed_loss(TrainedModel(module, compute_dtype=torch.float32), toys())
    assert_same(packed_loss(TrainedModel(module, compute_dtype=torch.float32), toys()), expected, 1e-6)


@pytest.mark.parametrize("family", [*KINDS, "falcon_h1"])
def test_adapters_on_mixers_equal_merged_weights_and_all_of_them_train(family):
    """Jamba's `dt_proj` is not among them: its weight is read past the adapter.

    Break: return every linear layer from `_targets`.
    """
    torch.manual_seed(1)
    policy = AdaptedModel(make_hybrid(family), lora=LoraConfig(rank=2, alpha=4), compute_dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in policy.parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    gradients, logprobs = packed_loss(policy, toys())
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    assert any("in_proj" in name for name in gradients)
    twin = make_hybrid(family, seed=5)
    copy_weights(twin, policy.state_tensors())
    _, expected = own_loss(twin, toys())
    for key, logprob in expected.items():
        assert logprobs[key] == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize(("family", "target"), [("jamba", "dt_proj"), ("nemotron_h", "out_proj")])
def test_layers_that_cannot_have_adapters_are_refused_by_name(family, target):
    with pytest.raises(ConfigError, match=target) as refused:
        AdaptedModel(
            make_hybrid(family),
            lora=LoraConfig(rank=2, alpha=4, target_modules=(target, "in_proj")),
            compute_dtype=torch.float32,
        )
    assert "in_proj" in str(refused.value)


@pytest.mark.parametrize(
    ("family", "algorithm", "config"), [("qwen3_5_text", "ppo", {}), ("lfm2", "grpo", {"gradient_checkpointing": True})]
)
def test_steps_with_parity_reference_and_critic_and_a_checkpoint_of_plain_transformers(
    tmp_path, family, algorithm, config
):
    source = make_hybrid(family)
    source.save_pretrained(tmp_path / "model")
    plan = TrainerPlan(
        model_path=str(tmp_path / "model"),
        algorithm=resolve(algorithm, LossConfig(kl="k3", kl_coef=0.1), 8),
        config=TrainerConfig(max_tokens_per_micro_batch=80, **config),
        critic=CriticConfig(learning_rate=1e-3),
        learning_rate=1e-2,
        planned_updates=4,
        seed=0,
    )
    trainer = Trainer.load(plan, "cpu")
    metrics = trainer.train_step([Batch(experiences=tuple(record(source, toys())))])
    assert metrics.values["logprob_gap_max"] < 1e-4
    trainer.save(tmp_path / "global_step_1", {"step": 1})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_1")
    ids_BT = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = plain_copy(trainer.policy.module)(input_ids=ids_BT).logits
        torch.testing.assert_close(loaded(input_ids=ids_BT).logits, expected, atol=1e-5, rtol=0)
        assert (expected - source(input_ids=ids_BT).logits).abs().max() > 1e-3


def test_the_calls_of_a_tree_by_hand():
    """A prompt of 3; below it a token with two children, and two answers. The token's children begin with it."""
    segments = [
        segment(0, 3, None, 13),
        segment(3, 4, 0, 8),
        segment(4, 6, 1),
        segment(6, 8, 1),
        segment(8, 12, 0),
        segment(12, 13, 0),
    ]
    plan = Calls.of(segments, CPU, continues=True)
    root, below = plan.calls
    assert root.rows_BT.tolist() == [[0, 1, 2]]
    assert (root.sources, root.kept) == ((), ((0, 0),))
    assert sorted(below.rows_BT.tolist()) == [
        [3, 3, 3, 3],
        [3, 4, 5, 5],
        [3, 6, 7, 7],
        [8, 9, 10, 11],
        [12, 12, 12, 12],
    ]
    assert (below.sources, below.kept) == ((0, 0, 0, 0, 0), ())
    used = [*root.rows_BT.flatten()[root.used_K], *below.rows_BT.flatten()[below.used_K]]
    assert torch.stack(used)[plan.order_N].tolist() == list(range(13))


def test_where_no_state_is_taken_up_each_path_is_computed_whole():
    segments = [segment(0, 3, None, 6), segment(3, 5, 0), segment(5, 6, 0)]
    plan = Calls.of(segments, CPU, continues=False)
    (call,) = plan.calls
    assert sorted(call.rows_BT.tolist()) == [[0, 1, 2, 2, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5, 5]]
    assert not call.sources
    assert not call.kept
    assert call.rows_BT.flatten()[call.used_K][plan.order_N].tolist() == list(range(6))


def test_answers_of_similar_length_are_one_call_and_prompts_of_one_length_another():
    """Prompts of 100 and 100 tokens and of 90, whose states are needed; answers of 200, 160 and 80 tokens."""
    segments, start = [], 0
    for prompt, answers in [(100, (200, 160)), (90, (80,)), (100, (200,))]:
        end = start + prompt + sum(answers)
        parent = len(segments)
        segments.append(segment(start, start + prompt, None, end))
        start += prompt
        for answer in answers:
            segments.append(segment(start, start + answer, parent))
            start += answer
    plan = Calls.of(segments, CPU, continues=True)
    assert sorted(tuple(call.rows_BT.shape) for call in plan.calls) == [(1, 80), (1, 90), (2, 100), (3, 200)]
