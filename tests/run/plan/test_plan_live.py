"""Memory of a pass without contents: the same as with contents, linear in depth, and by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_toys import FAMILIES, model_config
from torch.utils import _pytree as pytree
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model, Qwen3MoeConfig

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.learning.trainer.model import TrainedModel
from sharpen.run.plan.live import LiveBytes, Pass, _one_sequence, _pass_bytes, _peaks, pass_bytes

DEPTH = 5  # 2 and 3 layers are traced


class RealBytes(LiveBytes):
    """Counts tensors with contents."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return out


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_as_a_pass_that_is_computed(family: str, bfloat16: bool, checkpointing: bool) -> None:
    """The trainer scores and differentiates a real model, and what lives is counted operation by operation. Indices,
    which have contents in both, are all that may differ: some bytes for each token."""
    traced = Pass(num_tokens=300, num_loss_tokens=100, bfloat16=bfloat16, checkpointing=checkpointing)
    config = model_config(family)
    real, fake = real_bytes(config, traced), pass_bytes(config, traced)
    assert abs(real - fake) < 300 * 100
    assert fake == pytest.approx(real, rel=0.03)


def test_a_mixture_of_experts_in_float32() -> None:
    """Break: leave products by experts to PyTorch's rule for tensors without contents, which knows bfloat16 only."""
    config = Qwen3MoeConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    traced = Pass(num_tokens=300, num_loss_tokens=100, bfloat16=False)
    assert pass_bytes(config, traced) == pytest.approx(real_bytes(config, traced), rel=0.05)


def real_bytes(config: Any, traced: Pass) -> int:
    """The peak of a pass with contents."""
    torch.manual_seed(0)
    model = TrainedModel(
        AutoModelForCausalLM.from_config(config),
        compute_dtype=torch.bfloat16 if traced.bfloat16 else torch.float32,
        gradient_checkpointing=traced.checkpointing,
    )
    weights = list(model.module.parameters())
    for parameter in weights:
        parameter.grad = torch.zeros_like(parameter)
    packed = _one_sequence(traced, vocab_size=500)
    with RealBytes([*weights, *(weight.grad for weight in weights if weight.grad is not None)]) as live:
        scores = model.score(packed)
        (scores.logprobs_E.sum() + scores.entropy_E.sum()).backward()  # type: ignore[no-untyped-call]
    return max(live.peaks)


@pytest.mark.parametrize(
    ("accumulates", "num_tokens", "checkpointing", "lora"),
    [
        (True, 64, False, None),
        (False, 64, True, None),
        (True, 4096, True, None),
        (False, 1024, False, None),
        (True, 1024, True, LoraConfig(rank=4)),
    ],
)
def test_depth_is_extrapolated_exactly(
    accumulates: bool, num_tokens: int, checkpointing: bool, lora: LoraConfig | None
) -> None:
    """Without the marks between the parts of the pass the peak of another part was extrapolated, too low."""
    config = model_config(num_hidden_layers=DEPTH, vocab_size=50_000, hidden_size=256)
    traced = Pass(
        num_tokens=num_tokens,
        num_loss_tokens=50,
        bfloat16=True,
        checkpointing=checkpointing,
        accumulates=accumulates,
        lora=lora,
    )
    assert pass_bytes(config, traced) == max(_peaks(config, traced, DEPTH))


def test_more_tokens_take_more_and_checkpointing_takes_less() -> None:
    config = model_config(num_hidden_layers=8)

    def taken(num_tokens: int, **changes: Any) -> int:
        return pass_bytes(config, Pass(num_tokens=num_tokens, num_loss_tokens=32, bfloat16=True, **changes))

    by_tokens = [taken(n) for n in (128, 256, 512, 1024)]
    assert by_tokens == sorted(by_tokens)
    assert taken(1024, checkpointing=True) < taken(1024) / 2
    assert taken(1024, flash=True) < taken(1024)  # a GPU's kernel keeps bfloat16, the CPU's way float32


def test_the_vocabulary_is_held_in_chunks() -> None:
    """With room for 16 rows of logits, 300 rows take no more than 100: both have more than one chunk."""
    config = model_config(vocab_size=2000)

    def taken(num_loss_tokens: int, max_logits: int) -> int:
        return pass_bytes(
            config,
            Pass(num_tokens=400, num_loss_tokens=num_loss_tokens, bfloat16=False, max_logits=max_logits),
        )

    assert taken(300, 16 * 2000) == taken(100, 16 * 2000)
    assert taken(300, 1000 * 2000) > taken(300, 16 * 2000) + 200 * 2000 * 4


def test_live_bytes_by_hand() -> None:
    """Three tensors of 4,000 bytes, of which two live at once: then none."""
    with RealBytes() as live:
        one = torch.ones(1000)
        two = one + one
        del one
        three = two * 2
        del two, three
    assert live.peaks == [8000]
    assert live.now == 0


class CuriousConfig(Qwen3Config):
    model_type = "curious"


class CuriousBody(Qwen3Model):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        assert out.last_hidden_state.sum().item() == 0  # asks for a number where there is none
        return out


class Curious(Qwen3ForCausalLM):
    config_class = CuriousConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = CuriousBody(config)


def test_what_changes_no_pass_is_not_traced_again() -> None:
    """The base of adapters, with which docs/make_memory.py would take twice as long. Red when `pass_bytes` keeps it in
    the key."""
    config, traced = model_config("qwen3"), Pass(num_tokens=40, num_loss_tokens=8, bfloat16=True)
    before = _pass_bytes.cache_info().misses
    found = {pass_bytes(config, replace(traced, lora=LoraConfig(rank=2, base=base))) for base in ("own", "nf4")}
    assert len(found) == 1
    assert _pass_bytes.cache_info().misses == before + 1


def test_a_model_that_looks_at_contents_cannot_be_planned() -> None:
    AutoModelForCausalLM.register(CuriousConfig, Curious, exist_ok=True)
    fields = {name: value for name, value in model_config().to_dict().items() if name != "model_type"}
    with pytest.raises(ModelError, match="curious"):
        pass_bytes(CuriousConfig(**fields), Pass(num_tokens=20, num_loss_tokens=5, bfloat16=False))
