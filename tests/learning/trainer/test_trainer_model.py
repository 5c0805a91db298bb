"""Packed scoring equals the model's own forward pass, in logprobs and gradients, for every family."""

import copy

import numpy as np
import pytest
import torch
from trainer_toys import FAMILIES, hf_logprobs, make_experience, make_experiences, make_model, plain_copy

from sharpen.learning.trainer.constrained import FORBIDDEN, RowMasks
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.output import OutputLayer
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.scores import _moments, score_rows


def packed_loss(trained: TrainedModel, experiences, max_tokens=10_000, min_shared=4):
    """The gradient of the sum of advantage x weight x logprob, and the logprobs by (rollout, token)."""
    trained.module.zero_grad()
    logprobs = {}
    for packed in pack(experiences, max_tokens, min_shared_tokens=min_shared):
        logprobs_E = trained.score(packed).logprobs_E
        factor_E = torch.from_numpy(packed.advantages_E * packed.weights_E)
        (factor_E.to(logprobs_E) * logprobs_E).sum().backward()
        keys = zip(packed.rollouts_E.tolist(), packed.tokens_E.tolist(), strict=True)
        names = [(packed.rollout_ids[rollout], token) for rollout, token in keys]
        logprobs |= dict(zip(names, logprobs_E.tolist(), strict=True))
    return {name: parameter.grad.clone() for name, parameter in trained.parameters()}, logprobs


def own_loss(module, experiences):
    """The same by transformers, one sequence at a time."""
    module.zero_grad()
    logprobs = {}
    for experience in experiences:
        scored = hf_logprobs(module, experience)
        mask = experience.loss_mask_T
        factor = torch.from_numpy((experience.advantages_T * experience.weights_T)[mask]).to(scored)
        (factor * scored).sum().backward()
        names = [(experience.rollout_id, token) for token in np.flatnonzero(mask).tolist()]
        logprobs |= dict(zip(names, scored.tolist(), strict=True))
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}, logprobs


def assert_same(first, second, tolerance=1e-6):
    for name, grad in first[0].items():
        torch.testing.assert_close(grad, second[0][name], atol=tolerance, rtol=tolerance)
    assert first[1].keys() == second[1].keys()
    for key, logprob in first[1].items():
        assert logprob == pytest.approx(second[1][key], abs=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_sequence_at_a_time(family):
    """Sliding window (Mistral, shorter than the sequences), grouped heads and tied embeddings (Qwen3) included."""
    experiences = make_experiences()
    module = make_model(family)
    expected = own_loss(plain_copy(module), experiences)
    assert_same(packed_loss(TrainedModel(module, compute_dtype=torch.float64), experiences), expected)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_trap_19_gradient_does_not_depend_on_micro_batches_order_or_sharing(family):
    """Red if `Trainer` or `pack` divides anything by a pack's own count: a weight must hold the whole update's.

    Break: in `packed_loss` above or `Trainer._backward`, take the mean over a pack instead of the weighted sum.
    """
    experiences = make_experiences(num_groups=4)
    trained = TrainedModel(make_model(family), compute_dtype=torch.float64)
    expected = packed_loss(trained, experiences)
    for max_tokens in (1, 40, 100):
        assert_same(packed_loss(trained, experiences, max_tokens), expected)
    for min_shared in (1, 1000):
        assert_same(packed_loss(trained, experiences, min_shared=min_shared), expected)
    assert_same(packed_loss(trained, experiences[::-1]), expected)


def test_trap_22_padding_changes_no_gradient():
    """Ids behind the last loss token (padding, a tail of context) are not even computed.

    Break: in `_computed_ids` return all ids and in `Experience` set the mask on the padding.
    """
    experiences = make_experiences(num_groups=2)
    trained = TrainedModel(make_model("qwen3"), compute_dtype=torch.float64)
    padded = [
        make_experience(
            e.rollout_id,
            [*e.ids_T.tolist(), 2, 2, 2],
            [(int(np.argmax(e.calls_T == call)), int(np.flatnonzero(e.calls_T == call)[-1]) + 1) for call in (0, 1)],
            advantage=float(e.advantages_T.sum() / e.loss_mask_T.sum()),
            temperatures=(1.0, 0.7),
            weight=float(e.weights_T.max()),
        )
        for e in experiences
    ]
    assert_same(packed_loss(trained, padded), packed_loss(trained, experiences))
    assert sum(p.num_computed_tokens for p in pack(padded, 1000)) == sum(
        p.num_computed_tokens for p in pack(experiences, 1000)
    )


def test_trap_17_merging_calls_changes_no_gradient():
    """A rollout of two calls as one sequence, or as two (the second with the first as mere context): the same gradient.

    Break: in `_entries` give an entry the weight divided by its sequence's number of tokens.
    """
    (merged,) = make_experiences(num_groups=1, group_size=1)
    a, b = int(np.argmax(merged.calls_T == 0)), int(np.argmax(merged.calls_T == 1))
    ids, advantage, weight = (
        merged.ids_T.tolist(),
        float(merged.advantages_T.max() + merged.advantages_T.min()),
        float(merged.weights_T.max()),
    )
    first_stop = int(np.flatnonzero(merged.calls_T == 0)[-1]) + 1
    parts = [
        make_experience("g0/0", ids[:first_stop], [(a, first_stop)], advantage=advantage, weight=weight),
        make_experience("g0/0", ids, [(b, len(ids))], advantage=advantage, temperatures=(0.7,), weight=weight),
    ]
    trained = TrainedModel(make_model("llama"), compute_dtype=torch.float64)
    assert_same(packed_loss(trained, parts), packed_loss(trained, [merged]))
    assert_same(packed_loss(trained, parts, max_tokens=1), packed_loss(trained, [merged]))


def test_trap_10_logprobs_are_those_at_each_tokens_temperature():
    """Two calls of one rollout sampled at 1.0 and 0.5, and a shared hidden state read at two temperatures.

    Break: in `_score_chunk` drop the division by the temperature.
    """
    experiences = make_experiences(temperatures=(1.0, 0.5)) + [
        make_experience(e.rollout_id + "b", e.ids_T.tolist(), [(20, 24)], advantage=1.0, temperatures=(2.0,))
        for e in make_experiences(num_groups=1)
    ]
    module = make_model("qwen3")
    expected = own_loss(plain_copy(module), experiences)
    assert_same(packed_loss(TrainedModel(module, compute_dtype=torch.float64), experiences), expected)


def test_trap_23_dropout_is_off():
    """Break: remove `module.eval()` from `TrainedModel`, or pass the layer's dropout on to the attention."""
    module = make_model("llama")
    module.config.attention_dropout = 0.5
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = 0.5
        layer.mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    module.train()
    experiences = make_experiences(num_groups=1)
    trained = TrainedModel(module, compute_dtype=torch.float64)
    assert_same(packed_loss(trained, experiences), own_loss(plain_copy(make_model("llama")), experiences))


def test_gradient_checkpointing_gives_the_same_gradient_without_dropout():
    experiences = make_experiences(num_groups=2)
    expected = packed_loss(TrainedModel(make_model("qwen3"), compute_dtype=torch.float64), experiences)
    module = make_model("qwen3")
    module.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    trained = TrainedModel(module, compute_dtype=torch.float64, gradient_checkpointing=True)
    assert_same(packed_loss(trained, experiences), expected)


def test_a_large_vocabulary_is_scored_in_chunks():
    experiences = make_experiences(num_groups=2)
    module = make_model("qwen3")
    expected = packed_loss(TrainedModel(module, compute_dtype=torch.float64), experiences)
    chunked = TrainedModel(module, compute_dtype=torch.float64, max_logits=5 * 60)
    assert_same(packed_loss(chunked, experiences), expected, 1e-12)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("frozen", "bias"), [(False, True), (False, False), (True, True)])
def test_gradients_of_chunks_are_those_of_the_whole_matrix(entropy_gradient, softcap, frozen, bias):
    """Temperatures, rows with several entries, a mask of allowed tokens, a bias, a factor and a soft cap.

    Break: in `_gradient_of_logits` leave out the entropy, the temperature or a second entry of a row; in `_Product` the
    factor; in `_FrozenChunk` the temperature, the factor, `number_E`, or the second `index_fill_`.
    """
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(8, 70, bias=bias, dtype=torch.float64)
    layer.requires_grad_(not frozen)
    head = OutputLayer(embeddings=layer, factor=0.5, softcap=softcap)
    hidden_RC = torch.randn(7, 8, generator=generator, dtype=torch.float64)
    temperatures_R = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)
    row_E, targets_E = np.array([0, 6, 1, 2, 3, 4, 5, 3, 3]), np.array([1, 0, 33, 69, 40, 50, 63, 41, 41])
    masks_MW = torch.full((1, 3), -1, dtype=torch.int32)
    masks_MW[0, 0] = 0b1010
    masks = RowMasks(mask_R=np.array([0, -1, -1, -1, -1, -1, -1]), masks_MW=masks_MW)
    weights_E = torch.randn(2, 9, generator=generator, dtype=torch.float64)

    def scored(max_logits: int) -> list[torch.Tensor]:
        layer.zero_grad()
        own_RC = hidden_RC.clone().requires_grad_()
        found = score_rows(
            head, own_RC, temperatures_R, row_E, targets_E, entropy_gradient, None, None, max_logits, masks
        )
        assert found[1].requires_grad == entropy_gradient
        (found[0] * weights_E[0] + found[1] * weights_E[1]).sum().backward()
        trained = [] if frozen else [one.grad.clone() for one in layer.parameters()]
        return [*(one.detach() for one in found), own_RC.grad, *trained]

    for whole, chunked in zip(scored(1000), scored(3 * 70), strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-13, rtol=1e-12)


def test_gradients_of_an_output_layer_are_added_to_those_that_are_there():
    """In place, by a second micro-batch too. Break: return the sum also where it is the parameter's own gradient."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(8, 70, bias=False)
    hidden_RC = torch.randn(7, 8, generator=generator).requires_grad_()
    row_E, places = np.arange(7), []
    for _ in range(2):
        head = OutputLayer(embeddings=layer)
        found = score_rows(head, hidden_RC, None, row_E, row_E + 3, False, None, None, 3 * 70)
        found[0].sum().backward()
        places.append((layer.weight.grad.data_ptr(), layer.weight.grad.clone()))
    assert places[0][0] == places[1][0]
    torch.testing.assert_close(places[1][1], 2 * places[0][1])


def test_entropy_is_that_of_the_tempered_distribution():
    experiences = make_experiences(num_groups=1, group_size=1, temperatures=(0.5, 2.0))
    module = make_model("qwen2")
    (packed,) = pack(experiences, 1000)
    trained = TrainedModel(copy.deepcopy(module), compute_dtype=torch.float64)
    scores = trained.score(packed)
    assert not scores.entropy_E.requires_grad
    assert trained.score(packed, entropy_gradient=True).entropy_E.requires_grad
    logits_TV = plain_copy(module)(input_ids=torch.from_numpy(experiences[0].ids_T.astype(np.int64))[None]).logits[0]
    targets = np.flatnonzero(experiences[0].loss_mask_T)
    tempered = logits_TV[targets - 1] / torch.from_numpy(experiences[0].temperatures_T[targets])[:, None]
    torch.testing.assert_close(
        scores.entropy_E, torch.distributions.Categorical(logits=tempered).entropy(), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("vocab_size", [60, 64, 700])
def test_moments_are_those_of_each_row_s_distribution(vocab_size: int):
    """Variance of -logprob and cumulative probability, with ids at the ends of blocks, and a forbidden token."""
    generator = torch.Generator().manual_seed(0)
    logits_RV = 3 * torch.randn(3, vocab_size, generator=generator, dtype=torch.float64)
    logits_RV[1, 4] = FORBIDDEN
    row_E, targets_E = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([0, 5, 17, vocab_size - 1, min(63, vocab_size - 2)])
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    entropy_R, varentropy_R, cumulative_E = _moments(logprobs_RV, row_E, targets_E)
    probs_RV = logprobs_RV.exp()
    for row in range(3):
        surprise_V = -logprobs_RV[row]
        mean = float((probs_RV[row] * surprise_V).sum())
        assert float(entropy_R[row]) == pytest.approx(mean)
        assert float(varentropy_R[row]) == pytest.approx(float((probs_RV[row] * (surprise_V - mean) ** 2).sum()))
    for entry, (row, target) in enumerate(zip(row_E.tolist(), targets_E.tolist(), strict=True)):
        below = float(probs_RV[row, :target].sum() + probs_RV[row, target] / 2)
        assert float(cumulative_E[entry]) == pytest.approx(below, abs=1e-12)


def test_bfloat16_compute_keeps_fp32_weights_and_is_close():
    experiences = make_experiences(num_groups=2)
    module = make_model("qwen3", torch.float32)
    exact = packed_loss(TrainedModel(copy.deepcopy(module), compute_dtype=torch.float32), experiences)
    rounded = packed_loss(TrainedModel(module, compute_dtype=torch.bfloat16), experiences)
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    gaps = [abs(rounded[1][key] - logprob) for key, logprob in exact[1].items()]
    assert 0 < np.mean(gaps) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_scores_as_the_cpu_does(family):
    experiences = make_experiences()
    module = make_model(family, torch.float32)
    (packed,) = pack(experiences, 10_000)
    on_cpu = TrainedModel(copy.deepcopy(module), compute_dtype=torch.float32).score(packed)
    on_gpu = TrainedModel(module.cuda(), compute_dtype=torch.float32).score(packed)
    torch.testing.assert_close(on_gpu.logprobs_E.cpu(), on_cpu.logprobs_E, atol=1e-4, rtol=0)
