"""A role that a model plays in training (policy, reference): a Hugging Face causal model that scores packs.

In: a model directory, and `Pack`s. Out: for each loss entry the logprob of its target at its temperature, and the
entropy. Weights are kept in fp32; with `bfloat16`, matrix products are computed in it (autocast). The model is always
in evaluation mode: dropout would make these logprobs those of another model than the one that acted.

Shape suffixes: N computed tokens of a pack, E loss entries, R distinct (hidden state, temperature) pairs, V vocabulary,
C hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from sharpen.config.architectures import refuse_architecture
from sharpen.errors import ModelError
from sharpen.trainer.attention import NAME, TreeLayout, choose_varlen
from sharpen.trainer.liger import take_out, use_liger
from sharpen.trainer.packing import IndexArray, Pack, Segment
from sharpen.trainer.scores import OtherModel, PackScores, RowStatistic, max_logits_on, rows_of, score_rows, to_device
from sharpen.trainer.sharding import one_pass, shard
from sharpen.trainer.varlen import Varlen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

DType = Literal["auto", "float32", "bfloat16"]


class Scorer(Protocol):
    """A role that only says what it thinks of a pack (a reference)."""

    def score(self, pack: Pack) -> PackScores:
        """Logprobs and entropies of the pack's entries."""


class TrainedModel:
    """A causal model together with how it is computed."""

    adapters: Mapping[str, Any] | None = None
    """What adapters are trained (JSON); None where the weights themselves are."""

    def __init__(
        self,
        module: Any,
        *,
        compute_dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        max_logits: int | None = None,
        varlen: Varlen | None = None,
    ) -> None:
        """Take over `module`, a Hugging Face causal model. Raises `ModelError` if it cannot be trained faithfully.

        `max_logits` defaults to what suits the device, `varlen` (a kernel for attention) to the one that it has.
        """
        _refuse_unsupported(module.config)
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
        self.device: torch.device = next(module.parameters()).device
        self._max_logits = max_logits_on(self.device) if max_logits is None else max_logits
        self._varlen, attention = varlen, ""
        if varlen is None:
            self._varlen, attention = choose_varlen(module.config, compute_dtype, self.device)
        own_NV = self._own_logits()  # before any kernel is put in
        module.set_attn_implementation(NAME)
        liger = use_liger(module, self.device)
        if liger and (wrong := self._wrong_forward(own_NV)):
            take_out(module)
            liger = f"Liger kernels: not used, since with them logprobs are others ({wrong})"
        if self._varlen is not None and (wrong := self._wrong_kernel(own_NV)):
            self._varlen, attention = None, f"training attention: segment by segment (with a kernel {wrong})"
        if wrong := self._wrong_forward(own_NV):
            raise ModelError(
                f"model type {module.config.model_type!r}: packed training computes other logprobs than "
                f"the model's own forward pass ({wrong}); this architecture is not supported"
            )
        self.kernels = tuple(line for line in (attention, liger) if line)

    @classmethod
    def load(
        cls, source: str | Path, *, dtype: DType, device: torch.device, gradient_checkpointing: bool = False
    ) -> TrainedModel:
        """Read a Hugging Face model into fp32 weights on `device`."""
        return cls(
            read_module(source, device),
            compute_dtype=resolve_dtype(dtype, device),
            gradient_checkpointing=gradient_checkpointing,
        )

    def shard(self, mesh: DeviceMesh, device: torch.device, *, cpu_offload: bool, keep_head: bool) -> None:
        """Divide the weights among ranks; see `sharding.shard`. All of them make each pass, on `device`."""
        shard(self.module, mesh, dtype=self.compute_dtype, cpu_offload=cpu_offload, keep_head=keep_head)
        if device != self.device:
            self.device, self._max_logits = device, max_logits_on(device)
            self._varlen, attention = choose_varlen(self.module.config, self.compute_dtype, device)
            self.kernels = (attention,) if attention else ()

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters by their Hugging Face names; tied ones once."""
        return ((name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The weights of the model that acts, by their Hugging Face names (tied ones once): where they are trained
        themselves, the trainer's own memory, not a copy.
        """
        return {name: tensor.detach() for name, tensor in self.acting(self.module.named_parameters())}

    def keep_in(self, memory: Mapping[str, torch.Tensor]) -> bool:
        """Keep the weights in these tensors from now on, by the names of `state_tensors`; their values come along.

        False, with nothing changed, where that cannot be: other names, shapes, types or devices, adapters, or weights
        that are spread over several processes.
        """
        mine = dict(self.parameters())
        if self.adapters is not None or memory.keys() != mine.keys():
            return False
        if any(_kind(parameter.data) != _kind(memory[name]) for name, parameter in mine.items()):
            return False
        for name, parameter in mine.items():
            memory[name].copy_(parameter.data)
            parameter.data = memory[name]
        return True

    def acting(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the module's own tensors by name those of the model that acts, one after the other."""
        return iter(named)

    def written(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the model that acts that `write` wants, one after the other; they may be divided."""
        return self.acting(self.module.state_dict(keep_vars=True).items())

    def write(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of `written`, whole, as transformers does, in the type that they are computed in."""
        write_model(directory, self.module, tensors, self.compute_dtype)

    def write_trained(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write beside it what the trained parameters, whole, are beneath it: nothing where they are its weights."""

    def freeze(self) -> None:
        """No parameter is trained any more (a reference)."""
        self.module.requires_grad_(False)

    def score(
        self,
        pack: Pack,
        *,
        entropy_gradient: bool = False,
        compared: OtherModel | None = None,
        statistic: RowStatistic | None = None,
    ) -> PackScores:
        """Logprobs and entropies of the pack's entries, and their divergence from `compared` or their `statistic` (not
        both), at each entry's temperature; the entropy carries gradient only if asked."""
        device = self.device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            predict_R, temperatures_R, row_E = rows_of(pack)
            tempered = bool((temperatures_R != 1.0).any())  # dividing by 1 would be a pass over all logits for nothing

            def compute() -> tuple[torch.Tensor, ...]:
                hidden_NC = self._hidden(pack.ids_N, pack.positions_N, pack.segments)
                hidden_RC = hidden_NC.index_select(0, to_device(predict_R, device))
                return score_rows(
                    self.module.get_output_embeddings(),
                    hidden_RC,
                    to_device(temperatures_R, device) if tempered else None,
                    row_E,
                    pack.targets_E,
                    entropy_gradient,
                    compared,
                    statistic,
                    self._max_logits,
                )

            found = one_pass(self.module, compute)
        return PackScores(
            logprobs_E=found[0],
            entropy_E=found[1],
            divergence_E=found[2] if compared is not None else None,
            statistic_E=found[2] if statistic is not None else None,
        )

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute in another type for as long as this lasts, float32 by nothing that rounds. Not for a divided model,
        whose layers are gathered in their own type."""
        before = self.compute_dtype, self._varlen
        self.compute_dtype = dtype
        if dtype == torch.bfloat16:
            try:
                yield
            finally:
                self.compute_dtype = before[0]
            return
        self._varlen = None  # it computes in half precision
        hooks = [hook for layer in self.module.modules() if _is_rounded(layer) for hook in _widened(layer, dtype)]
        try:
            yield
        finally:
            self.compute_dtype, self._varlen = before
            for hook in hooks:
                hook.remove()

    def compare(self, pack: Pack, divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> OtherModel:
        """This model as another one's `compared`, for the same pack."""
        device = self.device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            (hidden_NC,) = one_pass(self.module, lambda: (self._hidden(pack.ids_N, pack.positions_N, pack.segments),))
            hidden_RC = hidden_NC.index_select(0, to_device(rows_of(pack)[0], device))
        return OtherModel(hidden_RC=hidden_RC, head=self.module.get_output_embeddings(), divergence=divergence)

    def read(self, pack: Pack, head: torch.nn.Linear) -> torch.Tensor:
        """What a head (C to 1) of the module says of the hidden states that the pack's entries are predicted from,
        shape E, in the type of its weights."""
        device = self.device

        def compute() -> tuple[torch.Tensor]:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
                hidden_NC = self._hidden(pack.ids_N, pack.positions_N, pack.segments)
                hidden_EC = hidden_NC.index_select(0, to_device(pack.predict_E, device))
            return (head(hidden_EC.to(head.weight.dtype)),)

        return one_pass(self.module, compute)[0].squeeze(-1)

    def _hidden(self, ids_N: IndexArray, positions_N: IndexArray, segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden states after the last norm, shape (N, C)."""
        positions = to_device(positions_N, self.device)
        output = self.module.get_decoder()(
            input_ids=to_device(ids_N, self.device)[None],
            position_ids=positions[None],
            use_cache=False,
            tree=TreeLayout(segments, positions, varlen=self._varlen),
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def _own_logits(self) -> torch.Tensor:
        """The probe's logits by the model's own forward pass over each branch, shape (N, V)."""
        self.module.set_attn_implementation("eager")
        with torch.no_grad():
            branches_BT = self._probe_ids()[[[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 8, 9, 10, 11]]]
            own_BTV = self.module(input_ids=to_device(branches_BT, self.device), use_cache=False).logits
        return torch.cat([own_BTV[0], own_BTV[1, 4:]])

    def _probe_ids(self) -> IndexArray:
        return np.arange(1, 13) % int(self.module.get_output_embeddings().weight.shape[0])

    def _packed_logits(self) -> torch.Tensor:
        """The probe's logits as a packed tree of two branches, shape (N, V)."""
        positions_N = np.array([0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7])
        segments = [
            Segment(start=0, stop=4, subtree_stop=12, parent=None),
            Segment(start=4, stop=8, subtree_stop=8, parent=0),
            Segment(start=8, stop=12, subtree_stop=12, parent=0),
        ]
        with torch.no_grad():
            logits_NV: torch.Tensor = self.module.get_output_embeddings()(
                self._hidden(self._probe_ids(), positions_N, segments)
            )
        return logits_NV

    def _wrong_forward(self, own_NV: torch.Tensor) -> str:
        """Compare a tiny packed tree with the model's own forward pass, so that no family is computed wrongly in
        silence; empty if they agree.
        """
        gap = float(_gaps(self._packed_logits(), own_NV).max())
        return f"by up to {gap:.3g}" if not gap < 1e-3 else ""

    def _wrong_kernel(self, own_NV: torch.Tensor) -> str:
        """The same with the kernel for attention, in the type that it is used in: it may be no further away than
        rounding alone is."""
        kernel, gaps = self._varlen, []
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            for self._varlen in (None, kernel):
                gaps.append(float(_gaps(self._packed_logits(), own_NV).mean()))
        rounded, with_kernel = gaps
        allowed = 2 * rounded + 1e-3
        return (
            "" if with_kernel <= allowed else f"logprobs are {with_kernel:.3g} away on average, {rounded:.3g} without"
        )


def _is_rounded(layer: torch.nn.Module) -> bool:
    """Whether it is a linear layer that is kept in bfloat16, as frozen ones are."""
    return isinstance(layer, torch.nn.Linear) and layer.weight.dtype == torch.bfloat16


def _widened(layer: torch.nn.Module, dtype: torch.dtype) -> list[RemovableHandle]:
    """Hooks by which a layer is in another type while it computes: one layer at a time, and back without loss."""
    kept = next(layer.parameters()).dtype

    def widen(layer: torch.nn.Module, _: Any) -> None:
        layer.to(dtype)

    def put_back(layer: torch.nn.Module, _: Any, __: Any) -> None:
        layer.to(kept)

    return [layer.register_forward_pre_hook(widen), layer.register_forward_hook(put_back)]


def _gaps(logits_NV: torch.Tensor, own_NV: torch.Tensor) -> torch.Tensor:
    return (logits_NV.to(own_NV.dtype).log_softmax(-1) - own_NV.log_softmax(-1)).abs()


def read_module(source: str | Path, device: torch.device) -> Any:
    """A Hugging Face causal model in fp32. Raises `ModelError` for architectures that are not supported."""
    config = AutoConfig.from_pretrained(source)
    _refuse_unsupported(config)
    return AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32).to(device)


def resolve_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """The compute type that a setting means on a device."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def _kind(tensor: torch.Tensor) -> tuple[type, torch.Size, torch.dtype, torch.device]:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device


def write_model(directory: Path, module: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Weights and config as transformers writes them, in `dtype`."""
    cast: dict[int, torch.Tensor] = {}  # tied weights must stay one tensor to be written once
    of_dtype = {name: cast.setdefault(tensor.data_ptr(), tensor.to(dtype)) for name, tensor in tensors.items()}
    module.save_pretrained(directory, state_dict=of_dtype)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def _refuse_unsupported(config: Any) -> None:
    """Raise `ModelError` for architectures whose training here would differ from the model that acts."""
    kind = config.model_type
    refuse_architecture(config, f"model type {kind!r}")
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if layers:
        raise ModelError(
            f"model type {kind!r} has {', '.join(sorted(layers))} layers: only attention layers are supported"
        )
