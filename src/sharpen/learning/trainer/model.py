"""A Hugging Face causal model that scores packs, as policy, reference, critic or teacher.

In: a model directory, and `Pack`s. Out: for each loss entry the logprob of its target at its temperature, and the
entropy. Weights are kept in fp32; with `bfloat16`, matrix products are computed in it (autocast). The model is always
in evaluation mode: with dropout, its logprobs would differ from those of the engine.

Shape suffixes: N computed tokens of a pack, E loss entries, R rows (`scores.rows_of`), V vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.autograd.graph import save_on_cpu
from transformers.modeling_layers import GradientCheckpointingLayer

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.learning.trainer.attention import NAME, TreeLayout, choose_varlen
from sharpen.learning.trainer.liger import take_out, use_liger
from sharpen.learning.trainer.output import OutputLayer
from sharpen.learning.trainer.packing import IndexArray, Pack, Segment
from sharpen.learning.trainer.probe import BRANCHES_BT, FIRST_N, POSITIONS_N, SEGMENTS, probe_ids
from sharpen.learning.trainer.recurrence import through_tree
from sharpen.learning.trainer.scores import (
    OtherModel,
    PackScores,
    RowStatistic,
    max_logits_on,
    row_masks,
    rows_of,
    score_rows,
    to_device,
)
from sharpen.learning.trainer.sharding import one_pass, shard
from sharpen.learning.trainer.tables import look_up_in_place
from sharpen.learning.trainer.varlen import Varlen
from sharpen.models.balance import Balance
from sharpen.models.checkpoint import SHARD_BYTES, in_parts, stored_types, write_checkpoint
from sharpen.models.configuration import read_config
from sharpen.models.experts import experts_of, round_experts
from sharpen.models.frozen import Served, is_plain, load_frozen
from sharpen.models.marks import Shown, both_ways
from sharpen.models.modules import decoder_of, freeze_towers, load_module, skeleton, trained_parameters
from sharpen.models.pieces import Piece, text_config
from sharpen.models.recurrent import mixers_of, replace_forward
from sharpen.models.routing import recording, routing_of, to_array
from sharpen.models.sight import Sight, View, showing
from sharpen.models.stand_ins import embed_all_tokens
from sharpen.models.table import missing_images, needs_of, refuse_unsupported
from sharpen.models.windows import short_windows, take_over_scales
from sharpen.types import RouteArray

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

DType = Literal["auto", "float32", "bfloat16"]

_TABLE_ROWS = 4096
"""Rows of embeddings that are compared at a time."""


class TrainedModel:
    """A causal model, with the precision and the kernels that it computes with."""

    adapters: Mapping[str, Any] | None = None
    """Settings of the trained adapters (JSON); None if the weights themselves are trained."""
    replays = True
    """Whether a mixture of experts computes with the experts that the engine chose, where they are recorded."""
    _probe_routes_NLK: torch.Tensor | None = None

    def __init__(
        self,
        module: Any,
        *,
        compute_dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        offload_activations: bool = False,
        train_towers: bool = False,
        max_logits: int | None = None,
        varlen: Varlen | None = None,
    ) -> None:
        """Take over `module`, a Hugging Face causal model. Raises `ModelError` if packed training cannot reproduce its
        logprobs, or if a vision tower is to be trained that it has not.

        `offload_activations` keeps what the backward pass needs of the forward pass in the host's memory. `max_logits`
        and `varlen` (an attention kernel) default to what suits the device.
        """
        refuse_unsupported(module.config, type(module).__name__, "trainer")
        module.eval()
        freeze_towers(module, but_vision=train_towers)
        if train_towers and (missing := missing_images(module.config)):
            name = module.name_or_path
            raise ModelError(f"trainer.train_towers is true, but {name} has no images ({missing}): set it to false")
        self.routing = routing_of(module)
        round_experts(module)
        look_up_in_place(module.get_input_embeddings())
        self._offloads = offload_activations
        self._both_ways = both_ways(module.config)
        self._sight = Sight(module) if Piece.VISION in needs_of(module.config) else None
        if gradient_checkpointing:
            # The older name goes away with transformers 6; the newer one is not in all of 5.
            enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
            again = {} if self.routing is None else {"context_fn": self.routing.checkpoint_contexts}
            enable({"use_reentrant": False, **again})
            for layer in module.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.training = True  # not its submodules: they stay in evaluation mode
        self.module = module
        self.compute_dtype = compute_dtype
        self.device: torch.device = next(module.parameters()).device
        self._max_logits = max_logits_on(self.device) if max_logits is None else max_logits
        self._varlen, attention = varlen, ""
        if varlen is None:
            self._varlen, attention = choose_varlen(module.config, compute_dtype, self.device)
        with _layers_in(module, torch.float32):
            own_NV = self._own_logits()  # before any kernel is installed
        _compute_trees(module)
        liger = use_liger(module, self.device)
        if liger and (wrong := self._wrong_forward(own_NV)):
            take_out(module)
            liger = f"Liger kernels: not used, because they change logprobs ({wrong})"
        if self._varlen is not None and (wrong := self._wrong_kernel(own_NV)):
            self._varlen, attention = None, f"training attention: segment by segment (with the kernel {wrong})"
        if wrong := self._wrong_forward(own_NV):
            raise ModelError(
                f"model type {module.config.model_type!r}: the logprobs of packed training differ from those of "
                f"the model's own forward pass ({wrong}); this architecture is not supported"
            )
        self.kernels = tuple(line for line in (attention, liger) if line)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: DType,
        device: torch.device,
        gradient_checkpointing: bool = False,
        offload_activations: bool = False,
        train_towers: bool = False,
    ) -> TrainedModel:
        """Load a Hugging Face model with fp32 weights on `device`."""
        return cls(
            read_module(source, device),
            compute_dtype=resolve_dtype(dtype, device),
            gradient_checkpointing=gradient_checkpointing,
            offload_activations=offload_activations,
            train_towers=train_towers,
        )

    def shard(self, mesh: DeviceMesh, device: torch.device, *, cpu_offload: bool, keep_head: bool) -> None:
        """Shard the weights over ranks; see `sharding.shard`. From then on, all ranks compute every pass together, each
        on its `device`."""
        shard(self.module, mesh, dtype=self.compute_dtype, cpu_offload=cpu_offload, keep_head=keep_head)
        self._compute_on(device)

    def move_to(self, device: torch.device) -> None:
        """Move the model to a device, before anything else has its parameters."""
        if device != self.device:
            self.module.to(device)
            self._compute_on(device)

    def _compute_on(self, device: torch.device) -> None:
        """Choose what suits the device that the weights are on, or are gathered on."""
        if device != self.device:
            self.device, self._max_logits = device, max_logits_on(device)
            self._varlen, attention = choose_varlen(self.module.config, self.compute_dtype, device)
            self.kernels = (attention,) if attention else ()

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the trained parameters by their Hugging Face names, tied ones once."""
        return ((name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad)

    def tables(self) -> list[torch.nn.Parameter]:
        """Return the weights of the embeddings and of the output layer, if it has its own."""
        layers = (self.module.get_input_embeddings(), self.module.get_output_embeddings())
        return [layer.weight for layer in layers if layer is not None]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights for the engine by their Hugging Face names, tied ones once: the text's, and a trained
        tower's. They are not copies, except merged weights of a model with adapters.
        """
        return {name: tensor.detach() for name, tensor in self.served()}

    def served(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of `state_tensors`, one at a time; they may be sharded."""
        return self.merge_adapters(trained_parameters(self.module))

    def move_weights_into(self, memory: Mapping[str, torch.Tensor]) -> bool:
        """Move the weights into these tensors, named as in `state_tensors`, and use them from now on.

        Return False, changing nothing, if that is impossible: other names, shapes, dtypes or devices, adapters, or
        weights sharded over several processes.
        """
        mine = dict(self.parameters())
        if self.adapters is not None or memory.keys() != mine.keys():
            return False
        if any(kind_of(parameter.data) != kind_of(memory[name]) for name, parameter in mine.items()):
            return False
        for name, parameter in mine.items():
            memory[name].copy_(parameter.data)
            parameter.data = memory[name]
        return True

    def merge_adapters(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Turn the module's tensors by name into those of the plain model, one at a time: here they are the same."""
        return iter(named)

    def checkpoint_parts(self, most: int = SHARD_BYTES) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors for `write` by name, some at a time (`models.checkpoint.in_parts`); they may be sharded."""
        return in_parts(self.module, self.merge_adapters(self.module.state_dict(keep_vars=True).items()), most)

    def write(self, directory: Path, parts: Iterable[dict[str, torch.Tensor]]) -> None:
        """Write the gathered `checkpoint_parts` in the compute dtype, as transformers does. They are emptied."""
        write_checkpoint(directory, self.module, parts, self.compute_dtype)

    @property
    def file_names_differ(self) -> bool:
        """Whether the files of `write` may lack or rename trained parameters, so that a resume needs them beside."""
        return bool(needs_of(self.module.config))

    def write_trained(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the gathered trained parameters next to the model: the adapters, or nothing if there are none."""

    def freeze(self) -> None:
        """Stop training all parameters (for a reference or teacher). Such a model also chooses its experts by itself:
        it is compared with no engine, and with experts that the policy chose it would be another model. In bfloat16,
        its linear layers and experts are kept rounded, as autocast would round them in every pass."""
        self.module.requires_grad_(False)
        if self.compute_dtype == torch.bfloat16:
            round_frozen(self.module, self.compute_dtype)
        self.replays = False

    def score(
        self,
        pack: Pack,
        *,
        entropy_gradient: bool = False,
        compared: OtherModel | None = None,
        statistic: RowStatistic | None = None,
        balance: Balance | None = None,
    ) -> PackScores:
        """Return logprobs and entropies of the pack's entries at each entry's temperature and under its constraint, and
        their divergence from `compared` or their `statistic` (not both). Entropies have a gradient only with
        `entropy_gradient`. With `balance`, the backward pass of a mixture of experts adds the gradient of that loss."""
        device = self.device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            rows = rows_of(pack)
            tempered = bool((rows.temperatures_R != 1.0).any())  # dividing by 1 would waste a pass over all logits
            masks = row_masks(pack, rows, device)

            def compute() -> tuple[torch.Tensor, ...]:
                hidden_NC = self._hidden_of(pack, balance)
                hidden_RC = hidden_NC.index_select(0, to_device(rows.predict_R, device))
                return score_rows(
                    OutputLayer.of(self.module),
                    hidden_RC,
                    to_device(rows.temperatures_R, device) if tempered else None,
                    rows.row_E,
                    pack.targets_E,
                    entropy_gradient,
                    compared,
                    statistic,
                    self._max_logits,
                    masks,
                )

            scores = one_pass(self.module, compute)
        return PackScores(
            logprobs_E=scores[0],
            entropy_E=scores[1],
            varentropy_E=scores[2],
            cumulative_E=scores[3],
            divergence_E=scores[4] if compared is not None else None,
            statistic_E=scores[4] if statistic is not None else None,
        )

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute in `dtype` inside this block; float32 avoids every rounded layer and kernel. Not for a sharded model,
        whose layers are gathered in a fixed dtype."""
        before = self.compute_dtype, self._varlen
        self.compute_dtype = dtype
        if dtype == torch.bfloat16:
            try:
                yield
            finally:
                self.compute_dtype = before[0]
            return
        self._varlen = None  # it computes in half precision
        try:
            with _layers_in(self.module, dtype):
                yield
        finally:
            self.compute_dtype, self._varlen = before

    @torch.no_grad()
    def routes_of(self, pack: Pack) -> RouteArray:
        """Return the experts that the model chooses for each token of a pack, shape (N, L, K), L of its layers and K
        experts of a token. Only for a mixture of experts."""
        assert self.routing is not None
        with (
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16),
            self.routing.recording() as recorded,
        ):
            one_pass(self.module, lambda: (self._hidden_of(pack),))
            return to_array(recorded.routes_NLK, self.routing.shape)

    def compare(self, pack: Pack, divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> OtherModel:
        """Return this model's hidden states of a pack, to pass as `compared` when another model scores it: where the
        pack has one for its teacher (`told`), those of that."""
        device = self.device
        read, predict_R = (pack, rows_of(pack).predict_R) if pack.told is None else (pack.told, pack.told.predict_E)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            (hidden_NC,) = one_pass(self.module, lambda: (self._hidden_of(read),))
            hidden_RC = hidden_NC.index_select(0, to_device(predict_R, device))
        return OtherModel(hidden_RC=hidden_RC, head=OutputLayer.of(self.module), divergence=divergence)

    def read(self, pack: Pack, head: torch.nn.Linear) -> torch.Tensor:
        """Apply a head (C to 1) of the module to the hidden states that predict the pack's entries; shape E, in the
        dtype of the head's weights."""
        device = self.device

        def compute() -> tuple[torch.Tensor]:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
                hidden_NC = self._hidden_of(pack)
                hidden_EC = hidden_NC.index_select(0, to_device(pack.predict_E, device))
            return (head(hidden_EC.to(head.weight.dtype)),)

        return one_pass(self.module, compute)[0].squeeze(-1)

    def _hidden_of(self, pack: Pack, balance: Balance | None = None) -> torch.Tensor:
        """Return the hidden states of a pack, computed with the experts that the engine chose if the model replays
        them; shape (N, C)."""
        routes_NLK = None
        if self.routing is not None and self.replays and pack.routes_NLK is not None:
            routes_NLK = to_device(pack.routes_NLK.astype(np.int64), self.device)
        balancing = nullcontext() if self.routing is None else self.routing.balancing(balance)
        with balancing, showing(self._view(pack)):
            hidden_NC = self._routed(pack.ids_N, pack.positions_N, pack.segments, routes_NLK, pack.shown)
        if self._sight is None or not self._sight.is_trained:
            return hidden_NC
        return hidden_NC + self._sight.nothing(hidden_NC.dtype)

    def _view(self, pack: Pack) -> View | None:
        """Return the images of a pack; None if it has none."""
        if not pack.shown:
            return None
        if self._sight is None:
            raise ModelError(
                f"{self.module.name_or_path} sees no images, and is given tokens that were sampled with some"
            )
        return self._sight.view_of(pack.positions_N, pack.shown)

    def _routed(
        self,
        ids_N: IndexArray,
        positions_N: IndexArray,
        segments: Sequence[Segment],
        routes_NLK: torch.Tensor | None,
        shown: Sequence[Shown] = (),
    ) -> torch.Tensor:
        """Return the hidden states, computed with these experts; None lets the model choose."""
        if self.routing is None:
            return self._hidden(ids_N, positions_N, segments, shown)
        with self.routing.replaying(routes_NLK):
            return self._hidden(ids_N, positions_N, segments, shown)

    def _hidden(
        self, ids_N: IndexArray, positions_N: IndexArray, segments: Sequence[Segment], shown: Sequence[Shown]
    ) -> torch.Tensor:
        """Return the hidden states after the last norm, shape (N, C)."""
        positions = to_device(positions_N, self.device)
        offloads = self._offloads and torch.is_grad_enabled()
        with save_on_cpu(pin_memory=self.device.type == "cuda") if offloads else nullcontext():
            output = decoder_of(self.module)(
                input_ids=to_device(ids_N, self.device)[None],
                position_ids=positions[None],
                use_cache=False,
                tree=TreeLayout(segments, positions, varlen=self._varlen, shown=shown, both_ways=self._both_ways),
            )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def _own_logits(self) -> torch.Tensor:
        """Return the probe's logits, shape (N, V), from the model's own forward pass over each branch."""
        decoder_of(self.module).set_attn_implementation("eager")
        ids_BT = probe_ids(self._vocabulary())[BRANCHES_BT]
        with torch.no_grad(), short_windows(self.module), recording(self.routing) as recorded:
            own_BTV = self.module(input_ids=to_device(ids_BT, self.device), use_cache=False).logits
            if recorded is not None and self.routing is not None:
                self.routing.check_all_chose()
                self._probe_routes_NLK = recorded.routes_NLK[FIRST_N]
        own_NV: torch.Tensor = own_BTV.flatten(0, 1)[FIRST_N]
        return own_NV

    def _vocabulary(self) -> int:
        return int(self.module.get_output_embeddings().weight.shape[0])

    def _packed_logits(self) -> torch.Tensor:
        """Return the probe's logits, shape (N, V), from the packed tree."""
        with torch.no_grad(), short_windows(self.module):
            ids_N = probe_ids(self._vocabulary())
            hidden_NC = self._routed(ids_N, POSITIONS_N, SEGMENTS, self._probe_routes_NLK)
            return OutputLayer.of(self.module).logits(hidden_NC)

    def _wrong_forward(self, own_NV: torch.Tensor) -> str:
        """Compare a tiny packed tree with the model's own forward pass, so that an unsupported architecture is noticed.
        Return the difference, or "" if they agree.
        """
        with _layers_in(self.module, torch.float32):
            gap = float(_gaps(self._packed_logits(), own_NV).max())
        return f"by up to {gap:.3g}" if not gap < 1e-3 else ""

    def _wrong_kernel(self, own_NV: torch.Tensor) -> str:
        """Do the same with the attention kernel in its own dtype. The difference may be at most about twice that of
        rounding alone."""
        kernel, gaps = self._varlen, []
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            for self._varlen in (None, kernel):
                gaps.append(float(_gaps(self._packed_logits(), own_NV).mean()))
        rounded, with_kernel = gaps
        allowed = 2 * rounded + 1e-3
        return (
            ""
            if with_kernel <= allowed
            else f"logprobs are off by {with_kernel:.3g} on average, without it by {rounded:.3g}"
        )


def _compute_trees(module: Any) -> None:
    """Let the text decoder of a model compute packed trees in place of sequences."""
    decoder = decoder_of(module)
    decoder.set_attn_implementation(NAME)
    take_over_scales(module)
    embed_all_tokens(module, decoder)
    for mixer in mixers_of(decoder):
        replace_forward(mixer, "tree", through_tree)


def keeps_table(module: Any, dtype: torch.dtype) -> bool:
    """Whether frozen embeddings lose nothing in `dtype`; of a model without contents, whether its files say so."""
    embeddings = module.get_input_embeddings()
    weight = embeddings.weight
    if type(embeddings) is not torch.nn.Embedding or weight.requires_grad or weight.dtype == dtype:
        return False
    if weight.is_meta:
        return bool(text_config(module.config).dtype == dtype)
    return all(torch.equal(some, some.to(dtype).to(some.dtype)) for some in weight.detach().split(_TABLE_ROWS))


def _as_float(embeddings: torch.nn.Module, ids: Any, found: torch.Tensor) -> torch.Tensor:
    """Forward hook: what is looked up goes on in fp32, as the sum of layers' outputs that it begins."""
    return found.float()


def _is_rounded(layer: torch.nn.Module) -> bool:
    """Whether this is a linear layer kept in bfloat16, as frozen ones are."""
    return isinstance(layer, torch.nn.Linear) and layer.weight.dtype == torch.bfloat16


@contextmanager
def _layers_in(module: Any, dtype: torch.dtype) -> Iterator[None]:
    """Let each layer that is kept in bfloat16 have its weights in a wider dtype while it computes."""
    hooks = [hook for layer in module.modules() if _is_rounded(layer) for hook in _cast_hooks(layer, dtype)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cast_hooks(layer: torch.nn.Module, dtype: torch.dtype) -> list[RemovableHandle]:
    """Add hooks that give a layer wider weights while it computes, and its own back afterwards."""
    own: dict[str, torch.Tensor] = {}

    def cast(layer: torch.nn.Module, _: Any) -> None:
        for name, parameter in layer.named_parameters(recurse=False):
            own[name] = parameter.data
            parameter.data = parameter.data.to(dtype)

    def cast_back(layer: torch.nn.Module, _: Any, __: Any) -> None:
        for name, parameter in layer.named_parameters(recurse=False):
            parameter.data = own.pop(name)

    return [layer.register_forward_pre_hook(cast), layer.register_forward_hook(cast_back)]


def _gaps(logits_NV: torch.Tensor, own_NV: torch.Tensor) -> torch.Tensor:
    return (logits_NV.to(own_NV.dtype).log_softmax(-1) - own_NV.log_softmax(-1)).abs()


def read_module(source: str | Path, device: torch.device) -> Any:
    """Load a Hugging Face causal model in fp32. Raises `ModelError` for unsupported architectures."""
    config = read_config(source)
    refuse_unsupported(config, str(source), "trainer")
    return load_module(source, config, torch.float32, device)


def read_frozen_module(
    source: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraConfig | None = None,
    served: Served | None = None,
) -> Any:
    """Load a model whose weights will be frozen and computed in `dtype`, as `round_frozen` keeps it: if files and
    `dtype` are bfloat16, they are never in fp32. What the engine has `served` of it is used (`models.frozen`). Raises
    `ModelError` for unsupported architectures."""
    config = read_config(source)
    refuse_unsupported(config, str(source), "trainer")
    if dtype != torch.bfloat16 or stored_types(Path(source)) != {"BF16"} or not is_plain(skeleton(config)):
        return load_frozen(source, config, torch.float32, device, lora, served)
    module = load_frozen(source, config, dtype, device, lora, served)
    for part in module.modules():
        if not isinstance(part, torch.nn.Linear | torch.nn.Embedding):
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.data.float()
    module.get_input_embeddings().register_forward_hook(_as_float)
    return module


def resolve_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """Return the compute dtype for a setting on a device."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def kind_of(tensor: torch.Tensor) -> tuple[type, torch.Size, torch.dtype, torch.device]:
    """Return what two tensors have in common of which one can stand in the place of the other."""
    return type(tensor), tensor.shape, tensor.dtype, tensor.device


def round_frozen(module: Any, dtype: torch.dtype) -> None:
    """Convert frozen linear layers and experts to `dtype`. Embeddings and norms, which autocast does not round, stay as
    they are; but embeddings that lose nothing by it, as those read from files in `dtype`, are kept in it and looked up
    in fp32. An output layer tied to others stays too.
    """
    embeddings = module.get_input_embeddings()
    table = embeddings.weight
    if keeps_table(module, dtype):
        embeddings.to(dtype)
        embeddings.register_forward_hook(_as_float)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear) and layer.weight is not table and not layer.weight.requires_grad:
            layer.to(dtype)
    for experts in experts_of(module).values():
        for weight in experts.parameters(recurse=False):
            if not weight.requires_grad:
                weight.data = weight.data.to(dtype)
