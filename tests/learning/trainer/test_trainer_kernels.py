"""What computes on a GPU, as far as a CPU can show: the layout for a variable-length kernel, with a plain kernel in
its place; its self-check; Liger's functions put into one model only. With the real kernels: tests marked `gpu`."""

import copy
import itertools
import sys

import numpy as np
import pytest
import torch
from trainer_toys import FAMILIES, make_experiences, make_model

from sharpen.learning.trainer import liger
from sharpen.learning.trainer.attention import TreeLayout, _per_segment, check_varlen, choose_varlen
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.output import exact_logits, output_logits
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.scores import MAX_LOGITS, max_logits_on
from sharpen.learning.trainer.varlen import Paths, TorchVarlen, varlen_attention


class PlainVarlen:
    """What a variable-length kernel computes, segment by segment; `lower_right` as FlashAttention since 2.1."""

    dtypes = frozenset({torch.float64, torch.float32})

    def __init__(self, *, lower_right: bool = True) -> None:
        self.lower_right = lower_right
        self.calls = 0

    def __call__(self, query_NHD, key_SKD, value_SKD, paths: Paths, *, scale, window):
        self.calls += 1
        outs = []
        ends = list(zip(paths.query_ends.tolist(), paths.key_ends.tolist(), strict=True))
        for (q0, k0), (q1, k1) in itertools.pairwise(ends):
            query, key, value = query_NHD[q0:q1], key_SKD[k0:k1], value_SKD[k0:k1]
            group = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query, key) * scale
            shift = len(key) - len(query) if self.lower_right else 0
            distance = torch.arange(len(query))[:, None] + shift - torch.arange(len(key))
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value))
        return torch.cat(outs)


def graded(run, inputs, weight):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("min_shared", [1, 1000])
def test_one_kernel_call_equals_attention_per_segment(window, min_shared):
    """Outputs and gradients over a deep tree, and over one without sharing (keys are not gathered there).

    Break: in `Paths.of` lay a segment's own keys before its ancestors', or leave out the `index_add_` of `_Gather`.
    """
    (packed,) = pack(make_experiences(num_groups=3, group_size=4), 10_000, min_shared_tokens=min_shared)
    tree = TreeLayout(packed.segments, torch.from_numpy(packed.positions_N))
    assert (tree.kernel_paths.keys_S is None) == (min_shared == 1000)
    torch.manual_seed(0)
    num = packed.num_computed_tokens
    inputs = [torch.randn(1, heads, num, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    weight = torch.randn(1, 4, num, 8, dtype=torch.float64)
    kernel = PlainVarlen()
    mine = graded(lambda q, k, v: varlen_attention(kernel, q, k, v, tree.kernel_paths, 0.3, window), inputs, weight)
    other = graded(lambda q, k, v: _per_segment(q, k, v, tree, 0.3, window), inputs, weight)
    assert kernel.calls == 1
    for first, second in zip(mine, other, strict=True):
        torch.testing.assert_close(first, second, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_a_kernel_scores_as_without(family):
    """Through transformers, in every family; Mistral's window is shorter than the sequences.

    Break: leave `varlen` out of the `TreeLayout` in `TrainedModel._hidden` (then the kernel is not called).
    """
    (packed,) = pack(make_experiences(), 10_000, min_shared_tokens=1)
    module, kernel = make_model(family), PlainVarlen()
    without = TrainedModel(copy.deepcopy(module), compute_dtype=torch.float64).score(packed)
    checked = TrainedModel(module, compute_dtype=torch.float64, varlen=kernel)
    before = kernel.calls
    with_kernel = checked.score(packed)
    assert kernel.calls == before + module.config.num_hidden_layers
    torch.testing.assert_close(with_kernel.logprobs_E, without.logprobs_E, atol=1e-9, rtol=0)


def test_a_kernel_with_another_mask_is_detected_and_not_used():
    """Masks aligned at the upper left, as some kernels have them. Break: return "" from `_wrong_kernel`."""
    module, kernel = make_model("qwen3"), PlainVarlen(lower_right=False)
    assert "of the largest value" in check_varlen(kernel, module.config, torch.device("cpu"))
    assert check_varlen(PlainVarlen(), module.config, torch.device("cpu")) == ""
    (packed,) = pack(make_experiences(), 10_000, min_shared_tokens=1)
    expected = TrainedModel(copy.deepcopy(module), compute_dtype=torch.float64).score(packed)
    trained = TrainedModel(module, compute_dtype=torch.float64, varlen=kernel)
    assert "segment by segment (with the kernel logprobs are" in trained.kernels[0]
    calls = kernel.calls
    torch.testing.assert_close(trained.score(packed).logprobs_E, expected.logprobs_E, atol=1e-9, rtol=0)
    assert kernel.calls == calls


def test_a_kernel_that_refuses_is_named():
    class Refusing(PlainVarlen):
        def __call__(self, *_, **__):
            raise RuntimeError("head dimension must be at most 256\nand more")

    wrong = check_varlen(Refusing(), make_model("qwen3").config, torch.device("cpu"))
    assert wrong == "RuntimeError: head dimension must be at most 256"


def test_on_a_cpu_no_kernel_is_chosen_and_no_line_shown():
    cpu, config = torch.device("cpu"), make_model("qwen3").config
    assert choose_varlen(config, torch.bfloat16, cpu) == (None, "")
    kernel, line = choose_varlen(config, torch.float32, torch.device("cuda"))
    assert kernel is None
    assert "trainer.dtype is float32" in line
    assert TrainedModel(make_model("qwen3"), compute_dtype=torch.float64).kernels == ()
    assert max_logits_on(cpu) == MAX_LOGITS


def test_liger_changes_one_model_and_no_class():
    """Break: leave out the loop that puts names back in `liger.put_in`."""
    module = make_model("qwen3")
    file = sys.modules[type(module).__module__]
    norm, mlp = file.Qwen3RMSNorm, file.Qwen3MLP
    asked = {}

    def fake(*, model, **settings):
        asked.update(settings)
        file.Qwen3RMSNorm = file.Qwen3MLP = object
        for layer in model.model.layers:
            own = layer.mlp.forward
            layer.mlp.forward = lambda hidden, own=own: own(hidden) * 2

    hidden = torch.ones(1, 1, 32, dtype=torch.float64)
    before = module.model.layers[0].mlp(hidden)
    liger.put_in(module, fake)
    assert (file.Qwen3RMSNorm, file.Qwen3MLP) == (norm, mlp)
    assert [name for name, on in asked.items() if on] == ["rms_norm", "swiglu"]
    torch.testing.assert_close(module.model.layers[0].mlp(hidden), 2 * before)
    liger.take_out(module)
    torch.testing.assert_close(module.model.layers[0].mlp(hidden), before)
    assert liger.use_liger(module, torch.device("cpu")) == ""


def test_logits_in_fp32_and_their_gradients():
    """Those of inputs rounded to bfloat16, where autocast's are rounded again; the gradient's rounding is bfloat16's.

    Break: in `_ExactLogits.backward` do not transpose the gradient for the weight.
    """
    torch.manual_seed(0)
    hidden_RC, weight_VC = torch.randn(5, 8, requires_grad=True), torch.randn(7, 8, requires_grad=True)
    logits_RV = exact_logits(hidden_RC, weight_VC, lambda first, second: first.float() @ second.float())
    rounded = [tensor.detach().bfloat16().float().requires_grad_() for tensor in (hidden_RC, weight_VC)]
    expected_RV = rounded[0] @ rounded[1].t()
    torch.testing.assert_close(logits_RV, expected_RV, atol=1e-6, rtol=0)
    grad_RV = torch.randn(5, 7)
    mine = torch.autograd.grad(logits_RV, [hidden_RC, weight_VC], grad_RV)
    other = torch.autograd.grad(expected_RV, rounded, grad_RV)
    for first, second in zip(mine, other, strict=True):
        assert first.dtype == torch.float32
        assert (first - second).norm() < 5e-3 * second.norm()
    head = torch.nn.Linear(8, 7, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert output_logits(head, hidden_RC).dtype == torch.bfloat16  # on a CPU nothing changes


@pytest.mark.gpu
def test_gpu_logits_in_fp32_are_the_rounded_ones_before_rounding():
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 1000, bias=False).cuda()
    hidden_RC = torch.randn(33, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        mine_RV, rounded_RV = output_logits(head, hidden_RC), head(hidden_RC)
    assert mine_RV.dtype == torch.float32
    assert (mine_RV - rounded_RV.float()).abs().max() <= 2**-8 * rounded_RV.float().abs().max()
    grads = [torch.autograd.grad(logits.float().logsumexp(-1).sum(), hidden_RC)[0] for logits in (mine_RV, rounded_RV)]
    assert (grads[0] - grads[1]).norm() < 2e-2 * grads[1].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_kernel_is_used_and_scores_as_without(family):
    """bfloat16 on both sides; gradients too."""
    (packed,) = pack(make_experiences(num_groups=4, group_size=4), 10_000, min_shared_tokens=1)
    module = make_model(family, torch.float32).cuda()
    plain = TrainedModel(copy.deepcopy(module), compute_dtype=torch.bfloat16)
    plain._varlen = None
    trained = TrainedModel(module, compute_dtype=torch.bfloat16)
    assert isinstance(trained._varlen, TorchVarlen), trained.kernels
    grads = []
    factor_E = torch.from_numpy(packed.advantages_E * packed.weights_E).cuda()
    for model in (plain, trained):
        scores = model.score(packed)
        (factor_E * scores.logprobs_E).sum().backward()
        grads.append({name: parameter.grad for name, parameter in model.parameters()})
        grads[-1]["logprobs"] = scores.logprobs_E.detach()
    for name, grad in grads[0].items():
        gap = (grads[1][name] - grad).norm() / grad.norm()
        assert gap < 0.05, (name, float(gap))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_gpu_liger_scores_as_without(family):
    pytest.importorskip("liger_kernel")
    (packed,) = pack(make_experiences(), 10_000)
    module = make_model(family, torch.float32)
    expected = TrainedModel(copy.deepcopy(module), compute_dtype=torch.float32).score(packed)
    trained = TrainedModel(module.cuda(), compute_dtype=torch.float32)
    assert any("RMSNorm, SwiGLU" in line for line in trained.kernels), trained.kernels
    torch.testing.assert_close(trained.score(packed).logprobs_E.cpu(), expected.logprobs_E, atol=1e-4, rtol=0)
    assert np.isfinite(trained.score(packed).entropy_E.detach().cpu().numpy()).all()
