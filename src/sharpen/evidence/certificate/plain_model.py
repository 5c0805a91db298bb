"""A model whose weights are given with every pass, to repeat an update: transformers' own forward pass of one sequence.

In: the folder of a model, a sequence, and its trained weights. Out: logprobs and entropies of its tokens, or a critic's
values. One sequence at a time, without padding, by none of the trainer's and families' code.

Shape suffixes: T tokens of a sequence, S of them that carry loss, V vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from sharpen.evidence.certificate.plain_experts import Chosen, num_experts_of
from sharpen.evidence.certificate.plain_pictures import Pictures
from sharpen.evidence.certificate.plain_quantized import FourBits
from sharpen.types import PictureSpan

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

HEAD = "value_head"
"""The critic's layer in place of the output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSequence:
    """A sequence that trains, of a rollout's call or of a row: its ids (T), the places of its S tokens with loss, and
    of these the recorded logprobs and the weights (S). `advantage` is that of all of them, `temperature` that of the
    call. `whole` is whether they were sampled from the whole distribution; `allowed_SV`, under a constraint, are the
    tokens among which each was. `routes_TLK` are the experts that were recorded for each token, if any were;
    `pictures` the images in it."""

    owner: str
    ids_T: Tensor
    places_S: Tensor
    recorded_S: Tensor
    weights_S: Tensor
    advantage: float = 1.0
    temperature: float = 1.0
    whole: bool = True
    allowed_SV: Tensor | None = None
    routes_TLK: Tensor | None = None
    pictures: tuple[PictureSpan, ...] = ()

    def of_tokens(self, values_SV: Tensor) -> Tensor:
        """Return of these values those of the tokens with loss (S)."""
        return values_SV.gather(1, self.ids_T[self.places_S, None])[:, 0]


class PlainModel:
    """A causal model of transformers', whose trained weights are given with every pass: all of them, or adapters by
    peft's names, of which the pass makes weights `W + scale B A`."""

    def __init__(
        self,
        folder: Path,
        *,
        rounded: bool,
        dtype: torch.dtype,
        adapter_scale: float | None,
        four_bits: FourBits | None = None,
    ) -> None:
        """`rounded`: with products in bfloat16, as autocast does. `adapter_scale` is given if adapters train, and
        `four_bits` if what they adapt is in 4 bits."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        sees = hasattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "vision_config")
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        plain = {"trust_remote_code": False, "experts_implementation": "eager"}
        module = kind.from_pretrained(folder, dtype=torch.float32, **plain)
        self._pictures = Pictures(folder, module) if sees else None
        self.module = module.eval().requires_grad_(False)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():  # not the complex numbers of some models' positions
                tensor.data = tensor.data.to(dtype)
        self.num_experts = num_experts_of(module.config)
        ends = (module.get_input_embeddings(), module.get_output_embeddings())
        self.tables = {name for name, own in module.named_parameters() if any(own is end.weight for end in ends)}
        self.dtype, self._rounded, self._scale, self._four_bits = dtype, rounded, adapter_scale, four_bits
        self._frozen: dict[str, Tensor] = {}

    def trained_names(self) -> list[str]:
        """Return the names of all weights, tied ones once; of a model that sees images, those of its text."""
        whole = (self.module.get_decoder(), self.module.get_output_embeddings()) if self._pictures else (self.module,)
        text = {id(own) for part in whole for own in part.parameters()}
        return [name for name, own in self.module.named_parameters() if id(own) in text]

    def logprobs(self, one: PlainSequence, weights: Tensors) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy of each token of a sequence that carries loss (S), at its temperature."""
        logprobs_SV = self.distributions(one, weights)
        entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
        return one.of_tokens(logprobs_SV), entropy_S

    def distributions(self, one: PlainSequence, weights: Tensors) -> Tensor:
        """Return the logprobs of the distribution that each of these tokens is drawn from (S, V)."""
        logits_SV = (
            self._forward(one, self._effective(weights)).logits[0, one.places_S - 1].to(self.dtype) / one.temperature
        )
        if one.allowed_SV is not None:
            logits_SV = logits_SV.masked_fill(~one.allowed_SV[:, : logits_SV.shape[1]], torch.finfo(self.dtype).min)
        return torch.log_softmax(logits_SV, -1)

    def values(self, one: PlainSequence, weights: Tensors) -> Tensor:
        """Return a critic's value of the state before each token that carries loss (S)."""
        body = {name: tensor for name, tensor in weights.items() if not name.startswith(HEAD)}
        hidden_TC = self._forward(one, body, output_hidden_states=True).hidden_states[-1][0].to(self.dtype)
        values_S: Tensor = hidden_TC[one.places_S - 1] @ weights[f"{HEAD}.weight"][0] + weights[f"{HEAD}.bias"]
        return values_S

    def compute_within(self, watch: AbstractContextManager[Any], one: PlainSequence, weights: Tensors) -> None:
        """Make the forward pass of a sequence within a block that sees what its routers choose."""
        self._forward(one, self._effective(weights), watch)

    def _forward(
        self, one: PlainSequence, weights: Tensors, watch: AbstractContextManager[Any] | None = None, **more: Any
    ) -> Any:
        experts = nullcontext() if one.routes_TLK is None else Chosen(one.routes_TLK, self.num_experts)
        if self._pictures is not None:
            more |= self._pictures.arguments(one.ids_T, one.pictures, self.dtype)
        with experts, watch or nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._rounded):
            return functional_call(self.module, dict(weights), kwargs={"input_ids": one.ids_T[None], **more})

    def _effective(self, weights: Tensors) -> Tensors:
        if self._scale is None:
            return weights
        merged = {}
        for name, down in weights.items():
            layer, found, _ = name.partition(".lora_A.")
            if found:
                up = weights[name.replace(".lora_A.", ".lora_B.")]
                merged[f"{layer}.weight"] = self._adapted(f"{layer}.weight") + self._scale * (up @ down)
        return merged

    def _adapted(self, name: str) -> Tensor:
        """A weight that an adapter changes, as it is without."""
        if name not in self._frozen:
            own = self.module.get_parameter(name)
            self._frozen[name] = own if self._four_bits is None else self._four_bits.rounded(own).to(self.dtype)
        return self._frozen[name]
