"""What the parts of an algorithm are, whoever writes them, and how those of others are found.

In: the name of a part in the settings. Out: the part. One that is not ours is a function, or an object that also says
more of it (`Advantage`, `PolicyLoss`, `KL`, `TokenWeights`): what it needs, and its second formula, from which the
certificate computes it again. A check of each is in `sharpen.testing`.

All are pure: the same input gives the same output, in any process; they change no input, and keep nothing. Parameters
that the settings may set (`loss.advantage_args`, `loss.policy_loss_args`) are keyword-only and have defaults.

Shape suffixes: C trained calls of a step, E tokens that carry loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sharpen.config.doors import find_part, place_of_part
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.returns import FloatArray, IndexArray, Scores

if TYPE_CHECKING:
    import torch

P = TypeVar("P")


class AdvantageFunction(Protocol):
    """Turns the rewards of a step into an advantage for each trained call."""

    def __call__(self, scores: Scores, /, *_: Any, **parameters: Any) -> FloatArray:
        """Return the advantages (C, in units of the reward or without a unit; finite), which every token of the call
        has. They do not depend on the order of the groups or of the rollouts in one."""


class PolicyLossFunction(Protocol):
    """Turns logprobs and advantages into a loss for each token."""

    def __call__(
        self,
        logprobs_E: torch.Tensor,
        old_logprobs_E: torch.Tensor,
        advantages_E: torch.Tensor,
        /,
        *calls_E: Any,
        **parameters: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each token (E), whose gradient by `logprobs_E` trains it, and which tokens (E, bool) a
        bound left without a gradient.

        Logprobs are natural logarithms, now and when the token was sampled (or, with a `behaviour` weight, at the start
        of the step). A token's loss depends on no other token. With `by_call` of `PolicyLoss` it may depend on those of
        its call: a fourth argument `calls_E` is the number of each token's call, all of whose tokens are there.
        """


class KLFunction(Protocol):
    """Estimates the divergence from the reference for each token."""

    def __call__(self, logprobs_E: torch.Tensor, reference_E: torch.Tensor, old_E: torch.Tensor, /) -> torch.Tensor:
        """Return the estimates (E, in nats) from the logprobs now, under the reference, and when sampled. It is 0 where
        the first two are equal, and depends on no other token."""


class AggregationFunction(Protocol):
    """Weighs the tokens of an update; its loss is the sum over tokens of weight times loss."""

    def __call__(self, rollouts_E: IndexArray, calls_E: IndexArray, /) -> FloatArray:
        """Return the weights (E, positive) from the numbers of each token's rollout and call, which are unique over the
        update. All tokens of a call have the same weight, and the order of the tokens does not matter."""


def named(kind: str, name: str | P | Callable[..., Any], ours: Mapping[str, P], cls: type[P]) -> P:
    """Return the part `name` of a kind, or the part itself where it is given. Raises `ConfigError` for one that nobody
    has, or that is none."""
    if not isinstance(name, str):
        return _part(name, getattr(name, "__name__", "the part"), cls)
    return ours[name] if name in ours else _part(_theirs(kind, name), name, cls)


@functools.cache
def _theirs(kind: str, name: str) -> Any:
    return find_part(kind, name, {})


def _part(found: Any, name: str, cls: type[P]) -> P:
    if isinstance(found, cls):
        return found
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{name} is {_what(found)}, not a function or a {cls.__name__} (docs/use/extending.md)")
    given: dict[str, Any] = {"function": found}
    if "formula" in cls.__annotations__:
        given["formula"] = said_by(found)
    return cls(**given)


def said_by(function: Callable[..., Any]) -> str:
    """Return the first line of a function's documentation, or its name."""
    return next(iter((function.__doc__ or "").strip().splitlines()), "") or getattr(function, "__name__", "?")


def place_of_field(kind: str, name: str, field: str) -> str:
    """Return the name of a part that is held in a field of another."""
    return f"{place_of_part(kind, name)}.{field}"


def _what(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
