"""The gradient of an update that is not made.

In: a trainer's parts, and sequences as of a step. Out: `Gradients`: what `backward` adds up to for each parameter, by
the same loss, packing, kernels and ranks that train. Weights, moments and version stay as they are.

Adapters and a critic's head begin at zero, where much of what trains has no gradient yet: while these sequences are
computed they are small random numbers, which are returned too.

Shape suffixes: N tokens of a sequence but the last, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from sharpen.learning.trainer.critic import Critic
from sharpen.learning.trainer.loss import Loss
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.sharding import shard_like, whole
from sharpen.learning.trainer.team import Team
from sharpen.learning.trainer.work import Minibatch
from sharpen.models.nf4 import NF4Linear
from sharpen.types import Experience, RouteArray

Arrays = Mapping[str, npt.NDArray[np.float32]]

STIRRED = 0.02
"""The standard deviation of what stands in place of zeros."""

_Parameters = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Gradients by the names of parameters; one that got none is missing. `names` are all parameters of the policy that
    train. `weights` are the adapters that the gradients were computed at (none if all weights train: these are those of
    the model's files), `critic_weights` the critic's head. `rounded` is whether products were computed in bfloat16,
    `in_4_bits` the type from which frozen layers were rounded to 4 bits, if they were, `has_experts` whether tokens
    choose experts: `routes` are those chosen, for each sequence (N, L, K). All but the first rank return empty
    arrays."""

    names: frozenset[str]
    policy: Arrays
    critic: Arrays = field(default_factory=dict)
    weights: Arrays = field(default_factory=dict)
    critic_weights: Arrays = field(default_factory=dict)
    rounded: bool = False
    in_4_bits: torch.dtype | None = None
    has_experts: bool = False
    routes: tuple[RouteArray | None, ...] = ()


def compute_gradients(
    policy: TrainedModel,
    critic: Critic | None,
    loss: Loss,
    team: Team,
    experiences: Sequence[Experience],
    names: Collection[str] | None,
    version: int,
) -> Gradients:
    """Return the gradient of an update on these sequences, which must be of an earlier version than `version`: no
    engine is compared with. `names` are the parameters whose gradients are returned (None: all)."""
    mine = list(policy.parameters())
    critics = [] if critic is None else list(critic.parameters())
    heads = [(name, one) for name, one in critics if name.startswith("value_head")]
    adapters = (
        [] if policy.adapters is None else [one for one in policy.module.named_parameters() if ".lora_" in one[0]]
    )
    with _stirring([one for _, one in (*adapters, *heads)]):
        _forget(mine, critics)
        if policy.routing is not None:
            experiences = [one if one.routes_NLK is not None else _with_experts(one, policy) for one in experiences]
        for work in loss.begin([Minibatch(experiences=experiences)], version=version, step=1, probe=()):
            loss.backward(work, version)
        found = Gradients(
            names=frozenset(name for name, _ in mine),
            policy=_gathered(team, _gradients(mine, names)),
            critic=_gathered(team, _gradients(critics, None if names is None else {*names, *dict(heads)})),
            weights=_copied(_gathered(team, adapters)),
            critic_weights=_copied(_gathered(team, heads)),
            rounded=policy.compute_dtype == torch.bfloat16,
            in_4_bits=next((one.state.dtype for one in policy.module.modules() if isinstance(one, NF4Linear)), None),
            has_experts=policy.routing is not None,
            routes=tuple(one.routes_NLK for one in experiences),
        )
        _forget(mine, critics)
    return found


def _forget(*groups: _Parameters) -> None:
    for _, parameter in (one for group in groups for one in group):
        parameter.grad = None


def _gradients(parameters: _Parameters, names: Collection[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters:
        if parameter.grad is not None and (names is None or name in names):
            yield name, parameter.grad


def _gathered(team: Team, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, npt.NDArray[np.float32]]:
    """Return whole tensors on the first rank, as arrays, which cross processes cheaply; those in float32 on a CPU share
    their memory."""
    found = ((name, whole(tensor.detach())) for name, tensor in tensors)
    return {name: tensor.float().cpu().numpy() for name, tensor in found if team.rank == 0}


def _copied(arrays: Arrays) -> Arrays:
    """Copies of what goes on to be changed."""
    return {name: array.copy() for name, array in arrays.items()}


@contextmanager
def _stirring(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Let those that are zero be small random numbers inside this block, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    zeros = [one for one in parameters if not bool(whole(one.detach()).any())]
    with torch.no_grad():
        for one in zeros:
            one.copy_(shard_like(STIRRED * torch.randn(one.shape, generator=generator), one))
    try:
        yield
    finally:
        with torch.no_grad():
            for one in zeros:
                one.zero_()


def _with_experts(experience: Experience, policy: TrainedModel) -> Experience:
    """Return the sequence with the experts that the policy chooses itself, as if an engine had recorded them."""
    (alone,) = pack([experience], len(experience.ids_T))
    chosen_NLK = policy.routes_of(alone)
    missing = len(experience.ids_T) - 1 - len(chosen_NLK)
    return replace(experience, routes_NLK=np.pad(chosen_NLK, ((0, missing), (0, 0), (0, 0))))
