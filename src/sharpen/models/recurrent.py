"""Runs the recurrent and convolution layers of a Hugging Face model from any state, and hands over the state behind.

In: a loaded model. Out: its `Mixer`s (gated delta nets, Mamba layers, short convolutions), each of which computes a run
of tokens from the state before it. The layers of transformers read and write their state through a cache; they are
given a `_Carrier` in its place, so that their own forward pass is used as it is, with whatever kernels it finds.

Shape suffixes: B sequences, T tokens of each, N tokens of one row, C hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sharpen.models.pieces import text_config

Kind = Literal["convolution", "recurrent"]
States = Mapping[tuple[Kind, int], torch.Tensor]
"""The states of one layer behind some tokens, by kind and index (a layer may have several): each has B rows. Empty
where nothing comes before."""


_NO_LIMITS = (0.0, float("inf"))
_DELTA_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """A recurrent or convolution layer.

    `owner` is the decoder layer that contains it, `cache_argument` the name by which `forward`, its own forward pass,
    takes the cache. `continues`: several tokens can be computed from a state; where not, only one at a time can.
    `chunk`: several tokens cost as much as the next multiple of so many. `kernels`: the modules whose
    kernels transformers takes, where they are installed.
    """

    module: torch.nn.Module
    owner: torch.nn.Module
    layer_index: int
    cache_argument: str
    continues: bool
    chunk: int
    kernels: tuple[str, ...]
    forward: Callable[..., Any]

    def run(self, hidden_BTC: torch.Tensor, before: States) -> tuple[torch.Tensor, States]:
        """Compute B sequences of T tokens, each from its state `before`; return the output (B, T, C) and the states
        behind the last tokens.

        With one token and a state, a layer may change the recurrent state it is given in place, which no gradient
        survives: there, pass a copy of what is kept, and compute at least two tokens where a gradient is needed.
        """
        carrier = _Carrier(before)
        with _limited_step(self.module) if before and hidden_BTC.shape[1] == 1 else nullcontext():
            return self._output(hidden_BTC, carrier), carrier.after

    def step(self, hidden_B1C: torch.Tensor, states: States) -> torch.Tensor:
        """Compute the next token of B sequences, whose `states` are changed in place; return the output (B, 1, C).

        This is for sampling: no gradient survives it. `run` would have a convolution compute its whole window again.
        """
        carrier = _Carrier(states, recording=False)
        with _limited_step(self.module):
            mixed_B1C = self._output(hidden_B1C, carrier)
        for key, state in carrier.after.items():
            if state is not states[key]:
                states[key].copy_(state)
        return mixed_B1C

    def _output(self, hidden_BTC: torch.Tensor, carrier: _Carrier) -> torch.Tensor:
        output = self.forward(hidden_BTC, **{self.cache_argument: carrier})
        mixed_BTC: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return mixed_BTC


@contextmanager
def _limited_step(module: Any) -> Iterator[None]:
    """Limit the step sizes of a Mamba 2 layer inside this block, as it does itself for several tokens, but not for one
    (Nemotron-H). They are softplus(x + bias), where x is the last part of the input projection; so x is limited."""
    least, most = getattr(module, "time_step_limit", _NO_LIMITS)
    if (least, most) == _NO_LIMITS:
        yield
        return
    bias_H = module.dt_bias
    limits = [torch.full_like(bias_H, limit).expm1().log() - bias_H for limit in (least, most)]

    def limit(_: torch.nn.Module, __: Any, output_BTP: torch.Tensor) -> torch.Tensor:
        other, steps_BTH = output_BTP[..., : -len(bias_H)], output_BTP[..., -len(bias_H) :]
        return torch.cat([other, steps_BTH.clamp(*limits).to(other.dtype)], dim=-1)

    hook = module.in_proj.register_forward_hook(limit)
    try:
        yield
    finally:
        hook.remove()


class _Carrier:
    """What a layer takes for its cache, during one forward pass: reads `before`, collects `after`.

    With `recording`, a single token goes through `update_conv_state` too, which changes nothing in place. Without, the
    layer changes the state of its convolution itself.
    """

    def __init__(self, before: States, *, recording: bool = True) -> None:
        self._before = before
        self._recording = recording
        self.after: dict[tuple[Kind, int], torch.Tensor] = dict(before)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._before.get(("convolution", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._before.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self._before)

    def is_recording_past(self, layer_idx: int) -> bool:
        return self._recording

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        """Keep the last inputs of a convolution, zeros before the first; return all that it has to see."""
        key: tuple[Kind, int] = ("convolution", state_idx)
        before = self._before.get(key)
        seen = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        missing = max(0, conv_kernel_size - seen.shape[-1])
        self.after[key] = torch.nn.functional.pad(seen, (missing, 0))[..., -conv_kernel_size:]
        return seen

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states


def mixers_of(module: torch.nn.Module) -> list[Mixer]:
    """Return the recurrent and convolution layers of a model, in the order of its layers.

    They are told by what they are made of: a causal convolution, and a forward pass that takes a cache.
    """
    modules = dict(module.named_modules())
    mixers = []
    for name, part in modules.items():
        forward = part.forward.own if isinstance(part.forward, _Replaced) else part.forward
        argument = _cache_argument(part, forward)
        if argument is None:
            continue
        mixers.append(
            Mixer(
                module=part,
                owner=modules[name.rpartition(".")[0]],
                layer_index=int(part.layer_idx),
                cache_argument=argument,
                continues=not hasattr(part, "x_proj"),  # Mamba 1, whose scan in transformers begins with zeros
                chunk=_chunk(part),
                kernels=_kernels(part),
                forward=forward,
            )
        )
    return mixers


@torch.inference_mode()
def example_state(mixers: Sequence[Mixer], model: Any) -> tuple[States, ...]:
    """Return a state of one sequence in each of these layers, for its shapes."""
    probe = torch.zeros(1, 2, text_config(model.config).hidden_size, dtype=model.dtype, device=model.device)
    return tuple(mixer.run(probe, {})[1] for mixer in mixers)


def _chunk(part: torch.nn.Module) -> int:
    """Mamba 2 names its chunk, gated delta nets have the default of their functions; a convolution alone has none."""
    return int(getattr(part, "chunk_size", _DELTA_CHUNK if _has_decay(part) else 1))


def _kernels(part: torch.nn.Module) -> tuple[str, ...]:
    if not _has_decay(part):
        return ("causal_conv1d",)
    return ("causal_conv1d", "mamba_ssm" if hasattr(part, "chunk_size") or hasattr(part, "x_proj") else "fla")


def _has_decay(part: torch.nn.Module) -> bool:
    """Whether a layer has a recurrent state, not only the last inputs of a convolution."""
    return any(name.endswith("A_log") for name, _ in part.named_parameters())


def _cache_argument(part: torch.nn.Module, forward: Callable[..., Any]) -> str | None:
    if not any(isinstance(child, torch.nn.Conv1d) for child in part.children()):
        return None
    parameters = inspect.signature(forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in parameters), None)


def replace_forward(mixer: Mixer, keyword: str, compute: Callable[[Mixer, torch.Tensor, Any], torch.Tensor]) -> None:
    """Let `compute(mixer, hidden_1NC, value)` give the output (1, N, C) of the mixer in forward passes that come
    with the keyword argument `keyword` (whose value it gets); all others stay as they are.

    The argument is read at the layer around the mixer, since some families do not pass it on.
    """
    replaced = _Replaced(mixer, keyword, compute)
    mixer.owner.register_forward_pre_hook(replaced.remember, with_kwargs=True)
    mixer.module.forward = replaced


class _Replaced:
    """The forward pass in place of a mixer's `own`."""

    def __init__(self, mixer: Mixer, keyword: str, compute: Callable[[Mixer, torch.Tensor, Any], torch.Tensor]) -> None:
        self.own = mixer.forward
        self._mixer, self._keyword, self._compute = mixer, keyword, compute
        self._value: Any = None

    def remember(self, _: torch.nn.Module, __: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
        """Keep the value with which the layer around the mixer is called."""
        self._value = arguments.get(self._keyword)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._value is None:
            return self.own(hidden_states, *args, **kwargs)
        return self._compute(self._mixer, hidden_states, self._value)


def join_states(parts: Sequence[States]) -> States:
    """Put the states of several sequences together, in their order. All have a state, or none has."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def row_of(states: States, row: int) -> States:
    """Return the states of one of the B sequences."""
    return {key: state[row : row + 1] for key, state in states.items()}
