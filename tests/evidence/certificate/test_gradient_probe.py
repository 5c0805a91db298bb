"""The gradient probe: trainers of all kinds without an alarm; faults planted in their passes, each found by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from expert_toys import EXPERTS, make_experts
from hybrid_toys import HYBRIDS, make_hybrid
from probe_trainer import make_config, make_trainer, probed, probed_twice, write_model
from trainer_toys import FAMILIES, make_model

from sharpen.errors import GradientError
from sharpen.evidence.certificate.gradient_probe import CRITIC, WHOLE, GradientProbe, probe_gradients, some_blocks
from sharpen.evidence.certificate.likeness import Gap, compare_gradients
from sharpen.evidence.certificate.plain.model import PlainModel
from sharpen.evidence.certificate.probe_batch import experiences, plain_sequences, probe_sequences, with_routes
from sharpen.learning.trainer.packing import Pack, pack
from sharpen.learning.trainer.trainer import Trainer

BFLOAT16 = {"trainer.dtype": "bfloat16"}
ADAPTERS = {"trainer.lora.rank": 4}
FOUR_BITS = {"trainer.lora.rank": 4, "trainer.lora.base": "nf4"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "in bfloat16": ("grpo", BFLOAT16),
    "in small packs, recomputed": (
        "grpo",
        {"trainer.gradient_checkpointing": True, "trainer.max_tokens_per_micro_batch": 40, "model.max_model_len": 64},
    ),
    "with entropy": ("dapo", {"loss.entropy_coef": 0.05}),
    "adapters": ("grpo", ADAPTERS),
    "adapters in bfloat16": ("grpo", BFLOAT16 | ADAPTERS),
    "adapters of a base in 4 bits": ("grpo", FOUR_BITS),
    "adapters of a base in 4 bits, in bfloat16": ("grpo", BFLOAT16 | FOUR_BITS),
    "a critic": ("ppo", {"loss.kl": "k1", "loss.kl_coef": 0.05, "loss.kl_in": "reward"}),
    "ratios of calls, clipped narrowly": ("gspo", BFLOAT16),
    "tokens masked by their ratio": ("icepop", {}),
    "tokens left out by moment": ("m2po", BFLOAT16),
    "tokens masked by total variation": ("dppo", {"loss.policy_loss_args": {"low": 0.01, "high": 0.01}}),
    "tokens masked by their divergence": ("dppo", {"loss.policy_loss": "dppo_kl"}),
    "calls weighed softly by their ratio": ("vespo", {}),
    "calls left out by their distance": ("grpo", {"loss.sequence_mask": 0.01}),
    "what the environment answered": ("grpo", {"loss.echo": 0.5}),
    "what the environment answered, in bfloat16": ("grpo", {"loss.echo": 0.5, "loss.entropy_coef": 0.01} | BFLOAT16),
    "tokens left out by entropies": ("grpo", {"loss.advantage": "clipb", "loss.advantage_args": {"mu": 0.3}}),
    "tokens left out by their own entropies": (
        "grpo",
        {"loss.advantage": "clipv", "loss.advantage_args": {"mu": 0.3, "max_frac": 0.1}},
    ),
    "a baseline of each token": ("otb", {}),
    "a baseline of each token, penalties and bfloat16": (
        "otb",
        {"loss.kl": "k1", "loss.kl_coef": 0.05, "loss.kl_in": "reward"} | BFLOAT16,
    ),
    "rows": ("sft", {}),
    "pairs": ("dpo", {"loss.kl": "k2", "loss.kl_coef": 0.1}),
}


BY_BLOCKS = ("grpo", "adapters", "a critic", "what the environment answered", "rows", "pairs")
BY_BLOCKS += tuple(kind for kind in KINDS if "bfloat16" in kind or "4 bits" in kind)
"""Kinds of which a model that is read block by block has other weights, sequences or precisions. The losses of the rest
see the same logprobs of the same sequences, which are computed together either way."""


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        pytest.param(kind, whole, id=f"{kind}-{'whole' if whole else 'by blocks'}")
        for kind in KINDS
        for whole in (WHOLE, 0)
        if whole or kind in BY_BLOCKS
    ],
)
def test_a_right_trainer_raises_no_alarm(kind, whole, toy_model_dir):
    algorithm, settings = KINDS[kind]
    found = probed(toy_model_dir, algorithm, whole=whole, **settings)
    assert not found.not_probed
    assert not found.problem, found.line
    assert max(gap.share for gap in found.gaps) < 0.5
    assert any(gap.name.startswith(CRITIC) for gap in found.gaps) == (algorithm == "ppo")


@pytest.mark.parametrize("settings", [{}, BFLOAT16, ADAPTERS], ids=repr)
@pytest.mark.parametrize("algorithm", ["jsd", "on_policy_distill"])
def test_a_teachers_part_is_compared_too(algorithm, settings, toy_model_dir, write_toy_model, tmp_path):
    teacher = {"distill.teacher_path": str(write_toy_model(tmp_path / "teacher", seed=7))}

    def twice(trainer: Trainer) -> None:
        trained = trainer._loss.algorithm
        trainer._loss.algorithm = replace(trained, distill=replace(trained.distill, coef=2.0))

    found, faulty = probed_twice(toy_model_dir, algorithm, twice, **settings, **teacher)
    assert not found.not_probed
    assert not found.problem, found.line
    assert max(gap.share for gap in found.gaps) < 0.5
    assert faulty.problem


def test_several_teachers_are_each_compared(toy_model_dir, write_toy_model, tmp_path):
    """Each teaches some of the batch; red when they change places."""
    folders = {name: str(write_toy_model(tmp_path / name, seed=seed)) for name, seed in (("maths", 7), ("code", 8))}
    settings = {"distill.teachers": folders, "distill.teacher_key": "domain"}
    found, faulty = probed_twice(toy_model_dir, "jsd", change_places, **settings)
    assert not found.problem
    assert faulty.problem


def change_places(trainer):
    teachers = trainer._loss._teachers.by_name
    teachers["maths"], teachers["code"] = teachers["code"], teachers["maths"]


FEW = {(family, "float32") for family in ("qwen2", "mistral", "qwen3_5_text", "granitemoehybrid", "lfm2", "gpt_oss")}
FEW |= {("qwen3_moe", "bfloat16"), ("deepseek_v3", "bfloat16")}


def families() -> list[Any]:
    """Every family of the trainer's toys in both precisions; all but `FEW` are slow tests."""
    kinds = [(family, lambda family: make_model(family, torch.float32)) for family in FAMILIES]
    kinds += [(family, make_hybrid) for family in HYBRIDS] + [(family, make_experts) for family in EXPERTS]
    return [
        pytest.param(
            make, family, dtype, id=f"{family}-{dtype}", marks=[] if (family, dtype) in FEW else [pytest.mark.slow]
        )
        for dtype in ("float32", "bfloat16")
        for family, make in kinds
    ]


@pytest.mark.parametrize(("make", "family", "dtype"), families())
def test_a_right_trainer_of_each_family_raises_no_alarm(make, family, dtype, tmp_path):
    folder = write_model(tmp_path, make(family))
    found = probed(folder, **{"trainer.dtype": dtype})
    assert not found.problem, found.line
    assert not found.not_probed
    assert max(gap.share for gap in found.gaps) < 0.5
    assert found.compared == 1.0


Fault = Callable[[Trainer], None]


def parameters(change: Callable[[torch.Tensor], torch.Tensor], part: str) -> Fault:
    """Change the gradient of the parameters with this part in their name."""

    def plant(trainer: Trainer) -> None:
        for name, parameter in trainer.policy.parameters():
            if part in name:
                parameter.register_hook(change)

    return plant


def outputs(change: Callable[[torch.Tensor], torch.Tensor], layer: str) -> Fault:
    """Change what a layer computes."""

    def plant(trainer: Trainer) -> None:
        trainer.policy.module.get_submodule(layer).register_forward_hook(lambda _, __, output: change(output))

    return plant


def backward(change: Callable[[torch.Tensor], torch.Tensor], layer: str) -> Fault:
    """Change the gradient that goes back through a layer: what it computes stays."""

    def hooked(output: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            output.register_hook(change)
        return output

    return outputs(hooked, layer)


def packs(change: Callable[[Pack], Pack]) -> Fault:
    """Let the policy compute other packs."""

    def plant(trainer: Trainer) -> None:
        score = trainer.policy.score
        trainer.policy.score = lambda pack, **more: score(change(pack), **more)

    return plant


def sequences(change: Callable[[list[Any]], list[Any]]) -> Fault:
    """Pack other sequences."""

    def plant(trainer: Trainer) -> None:
        packs = trainer._loss._packs
        trainer._loss._packs = lambda experiences: packs(change(list(experiences)))

    return plant


def without_prefix(one: Pack) -> Pack:
    """No segment attends to what is before it."""
    alone = [replace(segment, parent=None, subtree_stop=segment.stop) for segment in one.segments]
    return replace(one, segments=tuple(alone))


def frozen(trainer: Trainer) -> None:
    trainer.policy.module.get_submodule("model.layers.1.mlp").requires_grad_(False)


def last_pack_only(trainer: Trainer) -> None:
    """Gradients of the packs before are lost."""
    score = trainer.policy.score

    def forget_first(pack: Pack, **more: Any) -> Any:
        trainer._optimizer.zero_grad()
        return score(pack, **more)

    trainer.policy.score = forget_first


def scaled_adapters(trainer: Trainer) -> None:
    for layer in trainer.policy._layers.values():
        layer.scaling = {name: 2 * scale for name, scale in layer.scaling.items()}


def tied_from_one_side(trainer: Trainer) -> None:
    """The output layer's part of the gradient of tied embeddings is lost: rows that no input names get none."""
    table = trainer.policy.module.get_input_embeddings()
    seen: set[int] = set()
    table.register_forward_hook(lambda _, inputs, __: seen.update(inputs[0].flatten().tolist()))

    def kept(gradient: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(len(gradient), 1)
        rows[sorted(seen)] = 1.0
        return gradient * rows

    table.weight.register_hook(kept)


def no_clip(trainer: Trainer) -> None:
    loss = trainer._loss
    loss.algorithm = replace(loss.algorithm, policy_loss_args={"clip_low": 10.0, "clip_high": 10.0})


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def deaf(trainer: Trainer) -> None:
    trainer._loss.algorithm = replace(trainer._loss.algorithm, echo=None)


EVERYWHERE = "model."
ATTENTION = "model.layers.1.self_attn."
SMALL = {"trainer.max_tokens_per_micro_batch": 40, "model.max_model_len": 64}
FAULTS: dict[str, tuple[dict[str, Any], Fault, str]] = {
    "the attention's backward pass has a factor 2": ({}, backward(lambda g: 2 * g, ATTENTION + "q_proj"), ATTENTION),
    "the gradient of the keys is lost": ({}, backward(lambda g: 0 * g, ATTENTION + "k_proj"), ATTENTION),
    "a block's gradient is negated": ({}, parameters(lambda g: -g, "layers.0.mlp"), "model.layers.0.mlp"),
    "a tensor's gradient is negated": (
        {},
        parameters(lambda g: -g, "layers.1.input_layernorm"),
        "model.layers.1.input_lay",
    ),
    "a layer is frozen": ({}, frozen, "model.layers.1.mlp"),
    "one number of a gradient is lost": (
        {},
        parameters(lambda g: torch.where(g.abs() == g.abs().max(), 0 * g, g), "layers.0.mlp.up_proj"),
        "model.layers.0.mlp.up_proj",
    ),
    "tied embeddings learn from one side": ({}, tied_from_one_side, "model.embed_tokens"),
    "a prefix is left out of the attention": ({}, packs(without_prefix), EVERYWHERE),
    "positions are shifted within branches": (
        {},
        packs(lambda one: replace(one, positions_N=np.maximum(one.positions_N - 1, 0))),
        EVERYWHERE,
    ),
    "targets are predicted a token late": (
        {},
        packs(lambda one: replace(one, predict_E=np.minimum(one.predict_E + 1, len(one.ids_N) - 1))),
        EVERYWHERE,
    ),
    "temperatures are left out": (
        {},
        packs(lambda one: replace(one, temperatures_E=np.ones_like(one.temperatures_E))),
        EVERYWHERE,
    ),
    "a sequence is dropped": ({}, sequences(lambda many: many[1:]), EVERYWHERE),
    "negative advantages are skipped": (
        {},
        sequences(lambda many: [one for one in many if not (one.advantages_T < 0).any()]),
        EVERYWHERE,
    ),
    "only the last micro-batch counts": (SMALL, last_pack_only, EVERYWHERE),
    "a layer computes in half precision": ({}, outputs(half, "model.layers.0.mlp"), EVERYWHERE),
    "gradients are rounded to half precision": ({}, parameters(half, "layers.0."), "model.layers.0."),
    "ratios are not clipped": ({}, no_clip, EVERYWHERE),
    "what the environment answered is left out": ({"loss.echo": 0.5}, deaf, EVERYWHERE),
    "adapters are scaled twice": (ADAPTERS, scaled_adapters, EVERYWHERE),
    "half of the adapters does not learn": (ADAPTERS, parameters(lambda g: 0 * g, "lora_A"), "lora_A"),
    "in bfloat16, the attention's backward pass has a factor 2": (
        BFLOAT16,
        backward(lambda g: 2 * g, ATTENTION + "v_proj"),
        ATTENTION + "v_proj",
    ),
    "in bfloat16, a block's gradient is negated": (
        BFLOAT16,
        parameters(lambda g: -g, "layers.0.mlp"),
        "model.layers.0.mlp",
    ),
    "in bfloat16, a prefix is left out of the attention": (BFLOAT16, packs(without_prefix), EVERYWHERE),
    "in bfloat16, a sequence is dropped": (BFLOAT16, sequences(lambda many: many[1:]), EVERYWHERE),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_passes_is_found_and_named(name, toy_model_dir):
    settings, plant, where = FAULTS[name]
    found = probed(toy_model_dir, fault=plant, **settings)
    wrong = [gap.name for gap in found.gaps if gap.share > 1.0]
    assert wrong, found.line
    if len(wrong) == len(found.gaps):
        assert where == EVERYWHERE
        assert "Not one is right" in found.line
    else:
        nearest = found.line.partition("the backward pass's first: ")[2] or found.line.partition("in a block: ")[2]
        assert where in nearest, found.line
    if "gradient is" in name or "frozen" in name:  # of these nothing else goes wrong
        assert all(where in one for one in wrong), wrong
    with pytest.raises(GradientError, match=r"check\.gradients"):
        found.check()


def test_a_fault_in_a_recurrent_layer_is_found_there(tmp_path):
    """Red when sequences are too short for the states to matter."""
    folder = write_model(tmp_path, make_hybrid("qwen3_5_text"))
    found = probed(folder, fault=backward(lambda g: 2 * g, "model.layers.0.linear_attn.in_proj_qkv"))
    wrong = [gap.name for gap in found.gaps if gap.share > 1.0]
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in wrong
    assert not any("layers.1" in name for name in wrong)


def test_both_compute_with_the_experts_that_the_trainer_chooses(tmp_path):
    """Red when calls keep no experts, or when the trainer chooses again where some are given."""
    folder = write_model(tmp_path, make_experts("qwen3_moe"))
    trainer = make_trainer(folder, make_config(folder))
    made = probe_sequences(np.arange(10, 60), 20, "rollouts")
    calls = plain_sequences(made, "rollouts")
    found = trainer.gradients(experiences(made, calls))
    whole = [own for one, own in zip(made, found.routes, strict=True) for _ in one.calls]
    for call, own in zip(with_routes(made, calls, found.routes), whole, strict=True):
        assert call.routes_TLK.shape[0] == len(call.ids_T)
        assert np.array_equal(call.routes_TLK[:-1], own[: len(call.ids_T) - 1])
    others = [(own + 1) % 8 for own in found.routes]
    given = trainer.gradients(experiences(made, calls, others))
    assert all(np.array_equal(one, own) for one, own in zip(given.routes, others, strict=True))
    name = "model.layers.1.mlp.experts.down_proj"
    assert not np.allclose(given.policy[name], found.policy[name], rtol=1e-2)


def test_a_fault_in_an_expert_is_found_there(tmp_path):
    folder = write_model(tmp_path, make_experts("qwen3_moe"))
    fault = parameters(lambda g: g.index_fill(0, torch.tensor([3]), 0.0), "layers.1.mlp.experts.down_proj")
    found = probed(folder, fault=fault)
    assert [gap.name for gap in found.gaps if gap.share > 1.0] == ["model.layers.1.mlp.experts.down_proj"]


def balanced_twice(trainer):
    trainer._loss._balance._coef *= 2


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_balance_loss_is_in_the_gradient(family, algorithm, tmp_path):
    folder = write_model(tmp_path, make_experts(family))
    found, faulty = probed_twice(folder, algorithm, balanced_twice, **{"trainer.balance_coef": 0.5})
    assert not found.problem
    assert "model.layers.1.mlp.gate.weight" in [gap.name for gap in faulty.gaps if gap.share > 1.0]


class Elsewhere:
    """A trainer in another process, whose arrays arrive so that nobody can write to them (Ray's store)."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    def gradients(self, experiences, names=None):
        found = self.trainer.gradients(experiences, names)
        for arrays in (found.policy, found.critic, found.weights, found.critic_weights):
            for name, array in arrays.items():
                arrays[name] = array.copy()
                arrays[name].flags.writeable = False
        return found


@pytest.mark.parametrize("settings", [{}, ADAPTERS])
def test_gradients_from_another_process_are_compared(settings, toy_model_dir):
    """Red with torch's warning of arrays that cannot be written to."""
    config = make_config(toy_model_dir, "grpo", **settings)
    found = probe_gradients(config, toy_model_dir, Elsewhere(make_trainer(toy_model_dir, config)))
    assert not found.problem, found.problem
    assert found.gaps


def test_a_probe_leaves_the_trainer_as_it_was(toy_model_dir):
    config = make_config(toy_model_dir, "ppo", **ADAPTERS)
    trainer = make_trainer(toy_model_dir, config)
    critic = dict(trainer._critic.parameters())
    before = {name: one.detach().clone() for name, one in (*trainer.policy.parameters(), *critic.items())}
    state = torch.get_rng_state()
    assert not probe_gradients(config, toy_model_dir, trainer).problem
    assert torch.equal(torch.get_rng_state(), state)
    for name, one in (*trainer.policy.parameters(), *critic.items()):
        assert torch.equal(one, before[name]), name
        assert one.grad is None
    assert trainer.version == 0
    assert not trainer._optimizer.state_tensors()
    assert not critic["value_head.weight"].any()


def test_one_model_of_the_plain_loop_is_in_memory_at_a_time(toy_model_dir):
    """Red without the collection: modules that read their blocks are in circles, and a run's collector seldom comes."""
    config = make_config(toy_model_dir, "grpo", **BFLOAT16 | FOUR_BITS)
    trainer = make_trainer(toy_model_dir, config)
    gc.disable()
    try:
        before = sum(isinstance(one, PlainModel) for one in gc.get_objects())
        assert not probe_gradients(config, toy_model_dir, trainer, whole=0).problem
        assert sum(isinstance(one, PlainModel) for one in gc.get_objects()) <= before + 1
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("algorithm", "settings", "reason"),
    [
        ("on_policy_distill", {"distill.teacher_path": "none"}, "distill.teacher_path"),
        ("grpo", {"trainer.train_towers": True}, "the vision tower is trained"),
        ("grpo", {"loss.policy_loss": "mine.py:loss"}, "mine.py:loss, which is loss.policy_loss, brings no second"),
    ],
)
def test_what_the_plain_loop_does_not_make_is_named(algorithm, settings, reason, toy_model_dir, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def loss(logprobs_E, old_logprobs_E, advantages_E): ...\n")
    monkeypatch.chdir(tmp_path)
    found = probe_gradients(make_config(toy_model_dir, algorithm, **settings), toy_model_dir, None)
    assert reason in found.not_probed
    assert "not probed" in found.line
    found.check()


def test_without_memory_nothing_is_compared_or_some_blocks(toy_model_dir):
    config = make_config(toy_model_dir)
    trainer = make_trainer(toy_model_dir, config)
    assert "GiB" in probe_gradients(config, toy_model_dir, trainer, free=1000).not_probed
    size = sum(one.numel() for _, one in trainer.policy.parameters())
    found = probe_gradients(config, toy_model_dir, trainer, free=12 * size + 24 * size // 2)
    assert not found.problem
    assert 0 < found.compared < 1
    assert f"{found.compared:.0%} of the tensors" in found.line
    plant = parameters(lambda g: -g, "layers.1.mlp")
    plant(trainer)
    assert probe_gradients(config, toy_model_dir, trainer, free=12 * size + 24 * size // 2).problem


def test_whole_blocks_are_chosen_the_last_first():
    sizes = {"table": 50, "norm": 1} | {f"layers.{block}.{part}": 10 for block in range(8) for part in "ab"}
    assert some_blocks(sizes, 10_000) == sizes.keys()
    assert some_blocks(sizes, 41) == {"layers.7.a", "layers.7.b", "layers.0.a", "layers.0.b", "norm"}
    assert some_blocks(sizes, 5) == {"norm"}


def test_the_batch_has_what_goes_wrong_most_easily():
    """A tree of three levels, two calls in a sequence, a short prompt by itself, ids that may be used alone."""
    known = np.arange(10, 60)
    made = probe_sequences(known, 20, "rollouts")
    trained = experiences(made, plain_sequences(made, "rollouts"))
    (one,) = pack(trained, 10_000)
    assert sum(segment.parent is not None for segment in one.segments) >= 4
    assert any(one.segments[segment.parent].parent is not None for segment in one.segments if segment.parent)
    assert {len(sequence.calls) for sequence in made} == {1, 2}
    assert set(one.temperatures_E) == {1.0, 0.75}
    assert {np.sign(value) for value in one.advantages_E} == {1.0, -1.0}
    assert set(one.ids_N) <= set(known)


def test_a_gradient_that_is_missing_or_no_number_is_far_away():
    exact = {"a": torch.ones(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    rounded = {"a": torch.ones(3) + 1e-7, "b": torch.zeros(2)}
    missing = compare_gradients({}, exact, rounded)
    assert [gap.share > 1.0 for gap in missing] == [True, False]
    wrong = compare_gradients({"a": torch.tensor([1.0, float("nan"), 1.0])}, exact, rounded)
    assert GradientProbe(gaps=tuple(wrong)).problem
    assert Gap(name="a", distance=float("nan"), bound=1.0).share > 1.0
