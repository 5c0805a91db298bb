"""A role that a model plays in training (policy, reference): a Hugging Face causal model that scores packs.

In: a model directory, and `Pack`s. Out: for each loss entry the logprob of its target at its temperature, and the
entropy. Weights are kept in fp32; with `bfloat16`, matrix products are computed in it (autocast). The model is always
in evaluation mode: dropout would make these logprobs those of another model than the one that acted.

Shape suffixes: N computed tokens of a pack, E loss entries, R distinct (hidden state, temperature) pairs, V vocabulary,
C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from agenttune.errors import ModelError
from agenttune.trainer.attention import NAME, TreeLayout
from agenttune.trainer.packing import IndexArray, Pack, Segment
from agenttune.types import FloatArray

DType = Literal["auto", "float32", "bfloat16"]

MAX_LOGITS = 1 << 25
"""Logits (rows x vocabulary) held at a time; more are computed in chunks, and again in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a model says of a pack's loss entries (shape E, natural logarithms)."""

    logprobs_E: torch.Tensor
    entropy_E: torch.Tensor


class TrainedModel:
    """A causal model together with how it is computed."""

    def __init__(
        self,
        module: Any,
        *,
        compute_dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        max_logits: int = MAX_LOGITS,
    ) -> None:
        """Take over `module`, a Hugging Face causal model. Raises `ModelError` if it cannot be trained faithfully."""
        _refuse_unsupported(module.config)
        module.set_attn_implementation(NAME)
        module.eval()
        if gradient_checkpointing:
            # The older name goes away with transformers 6; the newer one is not in all of 5.
            enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            for layer in module.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.training = True  # the layer alone, not what is in it: that stays in evaluation mode
        self.module = module
        self.compute_dtype = compute_dtype
        self._max_logits = max_logits
        self._check_forward()

    @classmethod
    def load(
        cls, source: str | Path, *, dtype: DType, device: torch.device, gradient_checkpointing: bool = False
    ) -> TrainedModel:
        """Read a Hugging Face model into fp32 weights on `device`."""
        config = AutoConfig.from_pretrained(source)
        _refuse_unsupported(config)
        module = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32).to(device)
        if dtype == "auto":
            dtype = "bfloat16" if device.type == "cuda" else "float32"
        return cls(module, compute_dtype=getattr(torch, dtype), gradient_checkpointing=gradient_checkpointing)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.module.parameters()).device  # type: ignore[no-any-return]

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters by their Hugging Face names; tied ones once."""
        return ((name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad)

    def freeze(self) -> None:
        """No parameter is trained any more (a reference)."""
        self.module.requires_grad_(False)

    def score(self, pack: Pack, *, entropy_gradient: bool = False) -> Scores:
        """Logprobs and entropies of the pack's entries; the entropy carries gradient only if asked."""
        device = self.device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            hidden_NC = self._hidden(pack.ids_N, pack.positions_N, pack.segments)
            predict_R, temperatures_R, row_E = _rows(pack)
            hidden_RC = hidden_NC.index_select(0, _to(predict_R, device))
            return self._score_rows(hidden_RC, _to(temperatures_R, device), row_E, pack.targets_E, entropy_gradient)

    def states(self, pack: Pack) -> torch.Tensor:
        """The hidden states that the pack's entries are predicted from, shape (E, C)."""
        device = self.device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            hidden_NC = self._hidden(pack.ids_N, pack.positions_N, pack.segments)
            return hidden_NC.index_select(0, _to(pack.predict_E, device))

    def _hidden(self, ids_N: IndexArray, positions_N: IndexArray, segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden states after the last norm, shape (N, C)."""
        positions = _to(positions_N, self.device)
        output = self.module.get_decoder()(
            input_ids=_to(ids_N, self.device)[None],
            position_ids=positions[None],
            use_cache=False,
            tree=TreeLayout(segments, positions),
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def _score_rows(
        self,
        hidden_RC: torch.Tensor,
        temperatures_R: torch.Tensor,
        row_E: IndexArray,
        targets_E: IndexArray,
        entropy_gradient: bool,
    ) -> Scores:
        """Entries are sorted by row, so that a chunk of rows serves a range of entries; then put back in order."""
        device = hidden_RC.device
        order_E = np.argsort(row_E, kind="stable")
        sorted_row_E = row_E[order_E]
        head = self.module.get_output_embeddings()
        num_rows = len(hidden_RC)
        chunk = max(1, self._max_logits // head.weight.shape[0])
        logprobs, entropies = [], []
        for start in range(0, num_rows, chunk):
            stop = min(start + chunk, num_rows)
            first, last = np.searchsorted(sorted_row_E, [start, stop])
            inputs = (
                hidden_RC[start:stop],
                temperatures_R[start:stop],
                _to(sorted_row_E[first:last] - start, device),
                _to(targets_E[order_E[first:last]], device),
            )
            if num_rows > chunk and torch.is_grad_enabled():
                scored = checkpoint(_score_chunk, head, *inputs, entropy_gradient, use_reentrant=False)
            else:
                scored = _score_chunk(head, *inputs, entropy_gradient)
            logprobs.append(scored[0])
            entropies.append(scored[1])
        back_E = _to(np.argsort(order_E), device)
        return Scores(logprobs_E=torch.cat(logprobs)[back_E], entropy_E=torch.cat(entropies)[back_E])

    def _check_forward(self) -> None:
        """Compare a tiny packed tree with the model's own forward pass, so that no family is computed wrongly in
        silence.
        """
        vocabulary = self.module.get_output_embeddings().weight.shape[0]
        ids_N = np.arange(1, 13) % vocabulary
        positions_N = np.array([0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7])
        segments = [
            Segment(start=0, stop=4, subtree_stop=12, parent=None),
            Segment(start=4, stop=8, subtree_stop=8, parent=0),
            Segment(start=8, stop=12, subtree_stop=12, parent=0),
        ]
        branches_BT = ids_N[[[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 8, 9, 10, 11]]]
        with torch.no_grad():
            logits_NV = self.module.get_output_embeddings()(self._hidden(ids_N, positions_N, segments))
            self.module.set_attn_implementation("eager")
            own_BTV = self.module(input_ids=_to(branches_BT, self.device), use_cache=False).logits
            self.module.set_attn_implementation(NAME)
        expected_NV = torch.cat([own_BTV[0], own_BTV[1, 4:]])
        gap = float((logits_NV.log_softmax(-1) - expected_NV.log_softmax(-1)).abs().max())
        if not gap < 1e-3:
            raise ModelError(
                f"model type {self.module.config.model_type!r}: packed training computes other logprobs than "
                f"the model's own forward pass (by up to {gap:.3g}); this architecture is not supported"
            )


def _score_chunk(
    head: torch.nn.Module,
    hidden_RC: torch.Tensor,
    temperatures_R: torch.Tensor,
    row_E: torch.Tensor,
    targets_E: torch.Tensor,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_RV = head(hidden_RC)
    exact = torch.promote_types(logits_RV.dtype, torch.float32)
    logprobs_RV = (logits_RV.to(exact) / temperatures_R.to(exact)[:, None]).log_softmax(dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(dim=-1)
    return logprobs_RV[row_E, targets_E], entropy_R[row_E]


def _rows(pack: Pack) -> tuple[IndexArray, FloatArray, IndexArray]:
    """The distinct (hidden state, temperature) pairs, and for each entry which one is its."""
    temperatures, temperature_E = np.unique(pack.temperatures_E, return_inverse=True)
    key_R, row_E = np.unique(pack.predict_E * len(temperatures) + temperature_E, return_inverse=True)
    return key_R // len(temperatures), temperatures[key_R % len(temperatures)], row_E


def _to(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _refuse_unsupported(config: Any) -> None:
    """Raise `ModelError` for architectures whose training here would differ from the model that acts."""
    kind = config.model_type
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if layers:
        raise ModelError(
            f"model type {kind!r} has {', '.join(sorted(layers))} layers: only attention layers are supported"
        )
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            raise ModelError(
                f"model type {kind!r} routes to experts ({name}={getattr(config, name)}): routing could differ "
                "between engine and trainer, so mixture-of-experts models are not supported"
            )
