"""Attention over the tree for every rule that a layer may have: windows, soft caps, sinks, sizes, shared keys."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer_model import assert_same, own_loss, packed_loss
from trainer_toys import SIZES, make_experiences
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GraniteConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
)

from sharpen.learning.trainer.attention import TreeLayout, _head_shapes, _per_segment, tree_attention
from sharpen.learning.trainer.cascade import Cascade, full_parts, window_parts
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Segment, pack
from sharpen.models.blockwise import Scores

BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
FOUR = {**SIZES, "num_hidden_layers": 4}
MODELS: dict[str, Any] = {
    "soft caps": lambda: Gemma2Config(
        **SIZES, **BOTH, head_dim=8, attn_logit_softcapping=0.5, final_logit_softcapping=0.7
    ),
    "sinks": lambda: GraniteSWAConfig(**SIZES, **BOTH),
    "two kinds of layers": lambda: Gemma3TextConfig(**SIZES, **BOTH, head_dim=8),
    "scaled logits": lambda: GraniteConfig(**SIZES, logits_scaling=3.0),
    "multiplied logits": lambda: Cohere2Config(**SIZES, **BOTH, logit_scale=0.3),
    "sizes by layer, shared keys": lambda: Gemma4TextConfig(
        **FOUR,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=9,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=4,
    ),
    "shared keys": lambda: Gemma3nTextConfig(
        **FOUR,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=9,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=4,
        laurel_rank=4,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "chunks": lambda: Llama4TextConfig(
        **SIZES,
        head_dim=8,
        num_local_experts=1,
        moe_layers=[],
        intermediate_size_mlp=48,
        no_rope_layers=[1, 0],
        attention_chunk_size=9,
        floor_scale=4,
        attn_scale=0.5,
    ),
    "two sizes": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        n_routed_experts=0,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    ),
}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(MODELS[kind](), attn_implementation="eager").to(torch.float64)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "sinks" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return module.eval()


@pytest.mark.parametrize("kind", MODELS)
def test_packed_equals_one_sequence_at_a_time(kind: str) -> None:
    """Break: leave out the cap, its derivative, the sink, its gradient, `_widened`, the window, the chunks,
    the factor, or `take_over_scales`."""
    experiences = make_experiences(num_groups=2)
    module = make_model(kind)
    expected = own_loss(copy.deepcopy(module), experiences)
    # Some of the families compute their softmax in float32.
    assert_same(packed_loss(TrainedModel(module, compute_dtype=torch.float64), experiences), expected, 1e-5)


def a_tree() -> TreeLayout:
    packed = pack(make_experiences(num_groups=3, group_size=4), 10_000, min_shared_tokens=1)[0]
    return TreeLayout(packed.segments, torch.from_numpy(packed.positions_N))


def seen_by(tree: TreeLayout, window: int | None, chunk: int | None = None) -> torch.Tensor:
    """Who sees whom, by the definition, shape (N, N)."""
    segment_N = np.zeros(len(tree.positions_N), np.int64)
    for number, segment in enumerate(tree.segments):
        segment_N[segment.start : segment.stop] = number
    on_path = torch.tensor([[other in tree.paths[mine] for other in segment_N] for mine in segment_N])
    distance = tree.positions_N[:, None] - tree.positions_N
    if chunk is not None:
        on_path &= tree.positions_N[:, None] // chunk == tree.positions_N // chunk
    return on_path & (distance >= 0) & (distance < (window or len(segment_N)))


def at_once(q, k, v, sinks, seen, scale, softcap):
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, len(seen), 1)], dim=-1)
    return scores.softmax(-1)[..., : len(seen)] @ v


def graded(attend, inputs, weight):
    leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in inputs]
    out = attend(*leaves)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def assert_equal(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def random_inputs(tree: TreeLayout, sinks: bool) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, len(tree.positions_N), 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [*inputs, torch.randn(4, dtype=torch.float64) if sinks else None], torch.randn_like(inputs[0])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_parts_give_the_gradient_of_attention_at_once(window, softcap, sinks) -> None:
    """By both kernels, and in blocks that cut segments. Break: any of the terms of the backward pass."""
    tree = a_tree()
    inputs, weight = random_inputs(tree, sinks)
    seen, scores = seen_by(tree, window), Scores(scale=0.3, softcap=softcap)
    expected = graded(lambda q, k, v, s: at_once(q, k, v, s, seen, 0.3, softcap), inputs, weight)
    ways = [tree.parts(window, inputs[0], scores)]
    if window is None:
        ways.append(tuple(full_parts(tree.segments, tree.below, (3, 2))))
    for parts in ways:
        assert_equal(graded(lambda q, k, v, s: Cascade.apply(q, k, v, s, parts, scores), inputs, weight), expected)  # noqa: B023


@pytest.mark.parametrize("window", [None, 9])
def test_one_segment_at_a_time_gives_the_same(window) -> None:
    """The way of a GPU without a kernel. Break: align the causal mask at the upper left."""
    tree = a_tree()
    inputs, weight = random_inputs(tree, sinks=False)
    expected = graded(lambda q, k, v, s: at_once(q, k, v, s, seen_by(tree, window), 0.3, None), inputs, weight)
    assert_equal(graded(lambda q, k, v, s: _per_segment(q, k, v, tree, 0.3, window), inputs, weight), expected)


@pytest.mark.parametrize("chunk", [1, 4, 9, 1000])
def test_attention_in_chunks_is_full_attention_over_a_tree_that_is_cut(chunk) -> None:
    """In one piece, in blocks, and one segment at a time. Break: let a piece keep its parent where a chunk begins, or
    take a segment's descendants for one range."""
    tree = a_tree()
    inputs, weight = random_inputs(tree, sinks=True)
    *plain, _ = inputs
    scores, cut = Scores(scale=0.3), tree.in_chunks(chunk)
    assert (cut is tree) == (chunk == 1000)
    seen = seen_by(tree, None, chunk)
    expected = graded(lambda q, k, v, s: at_once(q, k, v, s, seen, 0.3, None), inputs, weight)
    for parts in (cut.parts(None, inputs[0], scores), tuple(full_parts(cut.segments, cut.below, (3, 2)))):
        assert_equal(graded(lambda q, k, v, s: Cascade.apply(q, k, v, s, parts, scores), inputs, weight), expected)  # noqa: B023
    expected = graded(lambda q, k, v: at_once(q, k, v, None, seen, 0.3, None), plain, weight)
    assert_equal(graded(lambda q, k, v: _per_segment(q, k, v, cut, 0.3, None), plain, weight), expected)


def test_a_chunk_reads_no_keys_before_it_however_long_the_prompt_is() -> None:
    """A prompt of 16,000 tokens and eight answers. Break: return the tree itself from `in_chunks`."""
    cut = long_tree(16_000, 300, 8).in_chunks(512)
    for part in cut.parts(None, torch.zeros(1, 1, 1, 8), Scores(scale=1.0)):
        assert part.sight.mask_LS is None
        assert sum(keys.stop - keys.start for keys in part.keys) <= 512


def long_tree(prompt: int, answer: int, count: int) -> TreeLayout:
    end = prompt + answer * count
    segments = [Segment(start=0, stop=prompt, subtree_stop=end, parent=None)]
    starts = range(prompt, end, answer)
    segments += [Segment(start=a, stop=a + answer, subtree_stop=a + answer, parent=0) for a in starts]
    positions = [np.arange(prompt), *(np.arange(prompt, prompt + answer) for _ in range(count))]
    return TreeLayout(segments, torch.from_numpy(np.concatenate(positions)))


def test_a_window_reads_no_more_keys_than_it_needs_however_long_the_prompt_is() -> None:
    """A prompt of 16,000 tokens and eight answers. Break: take all keys of the path in `window_parts`."""
    tree = long_tree(16_000, 300, 8)
    parts = list(window_parts(tree.segments, tree.paths, 512, torch.zeros(1)))
    assert sum(part.queries.stop - part.queries.start for part in parts) == 16_000 + 8 * 300
    masks = {id(part.sight.mask_LS): part.sight.mask_LS.numel() for part in parts}
    assert max(masks.values()) <= 512 * 1024
    assert sum(masks.values()) <= 4 * 512 * 1024  # shared: not one for each block


def test_scores_without_a_kernel_are_held_a_block_at_a_time() -> None:
    """Break: return None from `block_for`."""
    tree = long_tree(16_000, 300, 8)
    query = torch.zeros(1, 1, 1, 8)
    for part in tree.parts(None, query, Scores(scale=1.0, softcap=30.0)):
        num_keys = sum(keys.stop - keys.start for keys in part.keys)
        assert (part.queries.stop - part.queries.start) * num_keys <= 256 * 1024
    assert len(tree.parts(None, query, Scores(scale=1.0))) == 10  # the fused kernel needs no blocks


def test_a_mask_of_the_models_own_is_refused() -> None:
    tree = a_tree()
    query = torch.zeros(1, 4, len(tree.positions_N), 8)
    with pytest.raises(Exception, match="mask"):
        tree_attention(torch.nn.Linear(1, 1), query, query, query, torch.zeros(1), scaling=1.0, tree=tree)


def test_every_kind_of_layer_is_compared_with_the_kernel() -> None:
    """Break: return the first layer's shape only."""
    shapes = _head_shapes(MODELS["sizes by layer, shared keys"]())
    assert shapes == {(4, 2, 8), (4, 1, 16)}
    assert _head_shapes(MODELS["two sizes"]()) == {(4, 4, 12)}
