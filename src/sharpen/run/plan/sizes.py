"""The sizes of a model, counted on the model itself, built without contents.

In: a model folder or a name on the Hugging Face hub (only its `config.json` is read). Out: `Sizes`. Parameters are
counted, not computed by a formula, so that they are right for every family.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.models.pieces import Part, text_config
from sharpen.models.table import refuse_unsupported

WITHOUT_KEYS = frozenset({"linear_attention", "mamba", "conv", "moe", "mlp"})
"""Kinds of layers that keep no keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model. `parameters` counts those of the text, tied ones once, `towers` those that are held and
    never trained; `block_linear` counts those of the linear layers in the blocks, `vocabulary` (V x C) those of one
    embedding table; `tied` is whether the output layer shares the input's table; `kv_values` counts what the cache
    keeps of one position in each layer that keeps any.

    `linears` holds (last name, outputs, inputs) of every linear layer in the blocks, `experts` (number, two sizes) of
    every weight that has the matrices of all experts of a layer. `states` holds (convolution, recurrent) values of one
    sequence in every layer that keeps a state; `routes` counts the bytes of the experts of one token.
    """

    parameters: int
    towers: int
    block_linear: int
    vocabulary: int
    tied: bool
    num_layers: int
    kv_values: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    linears: tuple[tuple[str, int, int], ...]
    experts: tuple[tuple[int, int, int], ...]
    states: tuple[tuple[int, int], ...]
    routes: int

    @property
    def held(self) -> int:
        """All parameters of the checkpoint."""
        return self.parameters + self.towers

    @property
    def tables(self) -> int:
        """Those of embeddings and output layer."""
        return self.vocabulary * (1 if self.tied else 2)

    @property
    def is_dense(self) -> bool:
        """Whether it has neither recurrent layers nor experts nor towers."""
        return not (self.states or self.experts or self.towers)

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of keys and values of one position, in all layers that keep any."""
        return sum(self.kv_values) * itemsize

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of one sequence's states in all layers that keep some; recurrent ones are fp32."""
        return sum(itemsize * convolution + 4 * recurrent for convolution, recurrent in self.states)

    @property
    def in_experts(self) -> int:
        """Parameters of all experts."""
        return sum(count * one * other for count, one, other in self.experts)

    def adapted(self, lora: LoraConfig) -> int:
        """Return the parameters of the linear layers that get an adapter."""
        wanted = lora.target_modules
        return sum(out * into for name, out, into in self.linears if wanted is None or name in wanted)

    def lora_parameters(self, lora: LoraConfig) -> int:
        """Return the parameters of the adapters: rank x (inputs + outputs) for each adapted matrix (Hu et al. 2021)."""
        wanted = lora.target_modules
        sides = [out + into for name, out, into in self.linears if wanted is None or name in wanted]
        if lora.experts:
            sides += [count * (one + other) for count, one, other in self.experts]
        return lora.rank * sum(sides)


def read_model_config(model_path: str, setting: str = "model.model_path", part: Part = "trainer") -> Any:
    """Read the Hugging Face configuration. Raises `ModelError` if there is none, or `part` does not support it."""
    from sharpen.models.configuration import read_config
    from sharpen.models.modules import class_for

    path = Path(model_path).expanduser()
    config = read_config(path if path.is_dir() else model_path, f"{setting} {model_path!r}")
    refuse_unsupported(config, f"{setting} {model_path!r}", part)
    class_for(config, f"{setting} {model_path!r}")
    text = text_config(config)
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        if not isinstance(getattr(text, name, None), int):
            raise ModelError(
                f"{setting} {model_path!r}: model type {config.model_type!r} has no {name}: only text models can be "
                "planned"
            )
    return config


def sizes_of(config: Any) -> Sizes:
    """Build the model on the meta device and count. Raises `ModelError` if the configuration has no causal language
    model."""
    import torch

    from sharpen.models.experts import expert_weights, experts_of
    from sharpen.models.modules import decoder_of, skeleton, text_parameters

    try:
        model = skeleton(config)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"model type {config.model_type!r} has no causal language model: {error}") from error
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    linears = tuple(
        (name.rpartition(".")[2], int(layer.weight.shape[0]), int(layer.weight.shape[1]))
        for name, layer in decoder_of(model).named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
    )
    fused = [getattr(part, name).shape for part in experts_of(model).values() for name in expert_weights(part)]
    config = text_config(config)
    parameters = sum(parameter.numel() for _, parameter in text_parameters(model))
    return Sizes(
        parameters=parameters,
        towers=sum(parameter.numel() for parameter in model.parameters()) - parameters,
        block_linear=sum(out * into for _, out, into in linears),
        vocabulary=embedding.numel(),
        tied=head.weight is embedding,
        num_layers=int(config.num_hidden_layers),
        kv_values=_kv_values(config),
        hidden_size=int(config.hidden_size),
        intermediate_size=max((out for _, out, _ in linears), default=int(config.hidden_size)),
        vocab_size=int(embedding.shape[0]),
        linears=linears,
        experts=tuple((int(shape[0]), int(shape[1]), int(shape[2])) for shape in fused),
        states=_states(model),
        routes=_route_bytes(model),
    )


def _states(model: Any) -> tuple[tuple[int, int], ...]:
    """Return (convolution, recurrent) values of one sequence in each layer that keeps a state. They come from the
    layers themselves, which compute shapes alone."""
    from sharpen.models.recurrent import example_state, mixers_of

    return tuple(
        (
            sum(state.numel() for (kind, _), state in states.items() if kind == "convolution"),
            sum(state.numel() for (kind, _), state in states.items() if kind == "recurrent"),
        )
        for states in example_state(mixers_of(model), model)
    )


def _route_bytes(model: Any) -> int:
    """Return the bytes of the recorded experts of one token; 0 for a dense model."""
    from sharpen.models.routing import routing_of

    routing = routing_of(model)
    return 0 if routing is None else routing.shape.num_layers * routing.shape.top_k * routing.shape.dtype.itemsize


def _kv_values(config: Any) -> tuple[int, ...]:
    """Return the numbers of values that the cache keeps for one position: keys and values of each layer with attention,
    but for those that read another layer's."""
    heads, num_layers = int(config.num_attention_heads), int(config.num_hidden_layers)
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * num_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    values = []
    for kind, layer in zip(
        kinds[: num_layers - (getattr(config, "num_kv_shared_layers", None) or 0)], layers, strict=False
    ):
        if kind in WITHOUT_KEYS:
            continue
        key = getattr(config, "qk_head_dim", None) or getattr(layer, "head_dim", None) or config.hidden_size // heads
        value = getattr(config, "v_head_dim", None) or key
        values.append(int(getattr(layer, "num_key_value_heads", None) or heads) * int(key + value))
    return tuple(values)
