"""A model whose weights are given with every pass, to repeat an update: transformers' own forward pass of sequences.

In: the folder of a model, sequences, and its trained weights. Out: logprobs and entropies of their tokens, or a
critic's values, by none of the trainer's and families' code: one sequence at a time, or several of a tiny model or of
one that is read block by block, with padding after them, which no token before it sees.

Shape suffixes: T tokens of a sequence, S of them that carry loss, V vocabulary, C hidden size.
"""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from sharpen.errors import ModelError
from sharpen.evidence.certificate.plain.blocks import Blocks, Files, OfPass
from sharpen.evidence.certificate.plain.quantized import FourBits, InFourBits
from sharpen.types import PictureSpan

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

HEAD = "value_head"
"""The critic's layer in place of the output layer."""
_TOGETHER = 2**28
"""Products of a pass with several sequences, tokens times weights, at most. With so few its time is that of Python's
code, however many they are. Sequences of a real model are more, and go one by one in the memory of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSequence:
    """A sequence that trains, of a rollout's call or of a row, with the rollout's group: its ids (T), the places of its
    S tokens with loss, and of these the recorded logprobs and the weights (S). `advantage` is that of all of them,
    `temperature` that of the call. `whole` is whether it is known what they were sampled from; `allowed_SV`, if not
    from all tokens, are those among which each was. `routes_TLK` are the experts that were recorded for each token, if
    any were; `pictures` the images in it. `teacher` is the name of the one that teaches it, if several do. `shown` is
    its beginning, with what the environment answered to the call before. `taught_S` are the recorded logprobs of a
    teacher behind an endpoint. `read` is the sequence as a teacher with other tokens reads it, `stretches` are the
    tokens with loss, here and there, that spell the same."""

    owner: str
    group: str = ""
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
    teacher: str = ""
    shown: PlainSequence | None = None
    taught_S: Tensor | None = None
    read: PlainSequence | None = None
    stretches: tuple[tuple[slice, slice], ...] = ()

    def beginning(self, places_S: Tensor) -> PlainSequence:
        """Return the sequence up to the last of these places, which nobody sampled, with them in place of its own."""
        stop, count = int(places_S[-1]) + 1, len(places_S)
        return PlainSequence(
            owner=self.owner,
            ids_T=self.ids_T[:stop],
            places_S=places_S,
            recorded_S=torch.zeros(count),
            weights_S=torch.ones(count),
            routes_TLK=None if self.routes_TLK is None else self.routes_TLK[:stop],
            pictures=tuple(one for one in self.pictures if one.start < stop),
        )

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
        by_blocks: bool = False,
    ) -> None:
        """`rounded`: with products in bfloat16, as autocast does. `adapter_scale` is given if adapters train, and
        `four_bits` if what they adapt is in 4 bits. `by_blocks`: weights that do not train are read from the files when
        they are needed, where the model allows it (`blocks`)."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        sees = hasattr(config, "vision_config")
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        files = Files(folder) if by_blocks and may_be_read_by_blocks(folder) else None
        module = _load(kind, folder, config, None if files is None else files.dtype)
        self._pictures = Pictures(folder, module) if sees else None
        self.module = module.eval().requires_grad_(False)
        self.num_experts = num_experts_of(module.config)
        self._pads = self._pictures is None and self.num_experts is None
        self.dtype, self._rounded, self._scale, self._four_bits = dtype, rounded, adapter_scale, four_bits
        self._blocks: Blocks | None = None
        if files is not None:
            with suppress(ValueError):
                self._blocks = Blocks(module, files, dtype, self._made)
        for tensor in (*(() if self._blocks else module.parameters()), *module.buffers()):
            if tensor.is_floating_point():  # not the complex numbers of some models' positions
                tensor.data = tensor.data.to(dtype)
        ends = (module.get_input_embeddings(), module.get_output_embeddings())
        self.tables = {name for name, own in module.named_parameters() if any(own is end.weight for end in ends)}
        self._frozen: dict[str, Tensor | InFourBits] = {}

    @property
    def is_whole(self) -> bool:
        """Whether all weights are in memory."""
        return self._blocks is None

    def trained_names(self) -> list[str]:
        """Return the names of all weights, tied ones once; of a model that sees images, those of its text."""
        whole = (self.module.get_decoder(), self.module.get_output_embeddings()) if self._pictures else (self.module,)
        text = {id(own) for part in whole for own in part.parameters()}
        return [name for name, own in self.module.named_parameters() if id(own) in text]

    def groups(self, many: Sequence[Any], tokens: Callable[[Any], int] = lambda one: len(one.ids_T)) -> list[list[Any]]:
        """Return these in the groups that are computed together, in their order: of a model that is read block by block
        all, as reading takes longer than computing; of another one as many as stay few (`_TOGETHER`); each by itself
        where routers and images know of no padding. `tokens` is how many there are in one of these."""
        if self._blocks:
            return [[*many]] if many else []
        groups: list[list[Any]] = []
        longest, num_weights = 0, sum(own.numel() for own in self.module.parameters())
        for one in many:
            longest = max(longest, tokens(one))
            if groups and self._pads and (len(groups[-1]) + 1) * longest * num_weights <= _TOGETHER:
                groups[-1].append(one)
            else:
                groups.append([one])
                longest = tokens(one)
        return groups

    def logprobs(self, some: Sequence[PlainSequence], weights: Tensors) -> list[tuple[Tensor, Tensor]]:
        """Return logprob and entropy of each token that carries loss (S), at its temperature, for each sequence of a
        group."""
        distributions = self.distributions(some, weights)
        entropies = [-(logprobs_SV.exp() * logprobs_SV).sum(-1) for logprobs_SV in distributions]
        own = [one.of_tokens(logprobs_SV) for one, logprobs_SV in zip(some, distributions, strict=True)]
        return [*zip(own, entropies, strict=True)]

    def distributions(self, some: Sequence[PlainSequence], weights: Tensors) -> list[Tensor]:
        """Return the logprobs of the distribution that each of these tokens is drawn from (S, V).

        The sequences may be a group of another model, whose teacher this is, or several pairs: they are computed in
        this model's own groups.
        """
        of_pass = self._of_pass(weights)
        logits = (logits_TV for own in self.groups(some) for logits_TV in self._forward(own, of_pass).logits)
        return [self._distribution(one, logits_TV) for one, logits_TV in zip(some, logits, strict=True)]

    def _distribution(self, one: PlainSequence, logits_TV: Tensor) -> Tensor:
        logits_SV = logits_TV[one.places_S - 1].to(self.dtype) / one.temperature
        if one.allowed_SV is not None:
            logits_SV = logits_SV.masked_fill(~one.allowed_SV[:, : logits_SV.shape[1]], torch.finfo(self.dtype).min)
        return torch.log_softmax(logits_SV, -1)

    def values(self, some: Sequence[PlainSequence], weights: Tensors) -> list[Tensor]:
        """Return a critic's value of the state before each token that carries loss (S), for a group of sequences."""
        body: OfPass = {name: (own,) for name, own in weights.items() if not name.startswith(HEAD)}  # never adapters
        hidden = self._forward(some, body, output_hidden_states=True).hidden_states[-1].to(self.dtype)
        head_C, bias = weights[f"{HEAD}.weight"][0], weights[f"{HEAD}.bias"]
        return [hidden_TC[one.places_S - 1] @ head_C + bias for one, hidden_TC in zip(some, hidden, strict=True)]

    def compute_within(self, watch: AbstractContextManager[Any], one: PlainSequence, weights: Tensors) -> None:
        """Make the forward pass of a sequence within a block that sees what its routers choose."""
        self._forward([one], self._of_pass(weights), watch)

    def _forward(
        self,
        some: Sequence[PlainSequence],
        of_pass: OfPass,
        watch: AbstractContextManager[Any] | None = None,
        **more: Any,
    ) -> Any:
        rounding = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._rounded)
        ids = torch.nn.utils.rnn.pad_sequence([one.ids_T for one in some], batch_first=True)
        more |= {"input_ids": ids, "use_cache": False}
        if self._blocks is not None:
            with self._blocks.pass_with(of_pass), rounding:
                return self.module(**more)
        experts: AbstractContextManager[Any] = nullcontext()
        if not self._pads:
            (one,) = some
            experts = experts if one.routes_TLK is None else Chosen(one.routes_TLK, self.num_experts)
            if self._pictures is not None:
                more |= self._pictures.arguments(one.ids_T, one.pictures, self.dtype)
        made = {name: self._made(name, self.module.get_parameter(name), of_pass) for name in of_pass}
        with experts, watch or nullcontext(), rounding:
            return functional_call(self.module, made, kwargs=more)

    def _of_pass(self, weights: Tensors) -> OfPass:
        """What a pass has of each weight: the weight itself, or the adapter that changes it, up and down."""
        if self._scale is None:
            return {name: (weight,) for name, weight in weights.items()}
        downs = {name.partition(".lora_A."): down for name, down in weights.items() if ".lora_A." in name}
        return {
            f"{layer}.weight": (weights[f"{layer}.lora_B.{rest}"], down) for (layer, _, rest), down in downs.items()
        }

    def _made(self, name: str, own: Tensor, of_pass: OfPass) -> Tensor:
        """Return a weight as a pass has it; `own` is that of the files."""
        match of_pass.get(name):
            case None:
                return own.to(self.dtype)
            case (weight,):
                return weight.to(self.dtype)
            case (up, down) if self._scale is not None:
                return torch.addmm(self._unadapted(name, own), up, down, alpha=self._scale)
        raise AssertionError(name)

    def _unadapted(self, name: str, own: Tensor) -> Tensor:
        """A weight that an adapter changes, as it is without."""
        if self._four_bits is None:
            return own.to(self.dtype)
        if name not in self._frozen:
            kept = self._four_bits.kept(own)
            self._frozen[name] = kept if self._blocks else kept.values().to(self.dtype)
        found = self._frozen[name]
        return found.values().to(self.dtype) if isinstance(found, InFourBits) else found


def may_be_read_by_blocks(folder: Path) -> bool:
    """Whether a model is a text model without experts, whose files have one type; only its modules tell whether its
    weights are in blocks, under their own names."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return not hasattr(config, "vision_config") and num_experts_of(config) is None and Files(folder).dtype is not None


def _load(kind: Any, folder: Path, config: Any, stored: torch.dtype | None) -> Any:
    """Load a model with buffers in float32, and weights too or, if it is given, in the type of the files: then they are
    mapped, and take no memory until they are read."""
    plain = {"trust_remote_code": False, "experts_implementation": "eager"}
    if stored is not None:
        with torch.device("meta"):
            own = type(kind.from_config(config, dtype=torch.float32, trust_remote_code=False))

        class Stored(own):  # type: ignore[misc, valid-type]
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                for parameter in self.parameters():
                    parameter.data = parameter.data.to(stored)

        kind = Stored
    return kind.from_pretrained(folder, dtype=torch.float32, **plain)


# Lets a mixture of experts compute with the experts that were recorded, to repeat an update.
#
# In: the experts of each token in each layer with a router. Out: a block within which transformers' own routers choose
# them. Nothing is shared with `models.routing`: every router chooses by one `topk` among all experts of a layer; the
# first of these calls in a forward pass is that of the first layer with a router, and so on.
#
# Shape suffixes: N tokens, L layers with a router, K experts of a token.

_SIZES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What families call the number of experts of a layer."""


def num_experts_of(config: Any) -> int | None:
    """Return how many experts a layer of a model has; None if it says none."""
    text = config.get_text_config()
    return next((value for name in _SIZES if isinstance(value := getattr(text, name, None), int)), None)


class Chosen(TorchFunctionMode):
    """Gives the recorded experts and their own scores in place of the best ones. Raises `ModelError` at the end of the
    block unless each layer's were asked for once."""

    def __init__(self, routes_NLK: torch.Tensor, num_experts: int | None) -> None:
        super().__init__()
        self._routes_NLK, self._num_experts = routes_NLK, num_experts
        self._layer = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in (torch.topk, torch.Tensor.topk):
            return function(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        num_chosen = args[1] if len(args) > 1 else kwargs["k"]
        num_tokens, num_layers, num_recorded = self._routes_NLK.shape
        if tuple(scores.shape) != (num_tokens, self._num_experts) or num_chosen != num_recorded:
            return function(*args, **kwargs)  # among groups of experts
        self._layer += 1
        if self._layer > num_layers:
            raise ModelError(f"experts are recorded for {num_layers} layers, and the model has more with a router")
        chosen_NK = self._routes_NLK[:, self._layer - 1]
        return torch.return_types.topk((scores.gather(1, chosen_NK), chosen_NK))

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        if kind is None and self._layer != self._routes_NLK.shape[1]:
            raise ModelError(
                f"experts are recorded for {self._routes_NLK.shape[1]} layers, and {self._layer} routers chose among "
                f"{self._num_experts} by one topk"
            )


# The images of a sequence, as transformers' own model takes them, to repeat an update.
#
# In: image files and the ids of a sequence. Out: the arguments of the model's forward pass beside the ids: pixels by
# the checkpoint's own image processor, and which ids stand for images. Nothing is shared with `models.images` and
# `models.sight`.

_TOKENS = ("image_token_id", "image_token_index")
_MARKS = ("mm_token_type_ids", "token_type_ids")
"""What models call the argument that says which ids stand for images: 1 there, else 0."""


class Pictures:
    """How a model takes images."""

    def __init__(self, folder: Path, module: Any) -> None:
        """Raises `ModelError` if the model says no id of image tokens."""
        config = module.config
        found = [value for name in _TOKENS if isinstance(value := getattr(config, name, None), int)]
        if not found:
            raise ModelError(f"{config.model_type} says no id of its image tokens")
        self._token = found[0]
        self._takes = inspect.signature(module.forward).parameters
        self._folder = folder

    @functools.cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self._folder, backend="pil", trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(f"{self._folder} has no image processor that transformers can load: {error}") from error

    def arguments(self, ids_T: Tensor, spans: Sequence[PictureSpan], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the arguments for a sequence with these images. Raises `ModelError` if it has tokens of images outside
        of them: transformers would take these for images too."""
        shows_T = torch.zeros_like(ids_T, dtype=torch.int)
        for span in spans:
            shows_T[span.start : span.stop] = (ids_T[span.start : span.stop] == self._token).int()
        if spans and int(shows_T.sum()) != int((ids_T == self._token).sum()):
            raise ModelError("a token that stands for an image was sampled, where there is none")
        marks = {name: shows_T[None] for name in _MARKS if name in self._takes}
        read = [self._processor(images=[_opened(span.picture.data)], return_tensors="pt") for span in spans]
        names = [name for name in (read[0] if read else ()) if name in self._takes]
        tensors = {name: _joined([one[name] for one in read]) for name in names}
        return marks | {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}


def _opened(data: bytes) -> Any:
    """The first picture of a file, upright, in RGB, on white where it is transparent."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode == "I" or image.mode.startswith("I;16"):
        raise ModelError("an image has greys of 16 bits, which the plain loop does not read")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One batch; pixels of several sizes are padded to the largest."""
    if tensors[0].ndim != 4:
        return torch.cat(list(tensors))
    height, width = (max(one.shape[axis] for one in tensors) for axis in (2, 3))
    return torch.cat([pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in tensors])
