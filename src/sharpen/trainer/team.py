"""The ranks that train one model together, as the trainer sees them: what is one rank's work is divided among all.

In: the packs of an update, and what is to be computed of each. Out: the results of all of them on every rank, in the
order of the packs; so advantages, clipping, comparison with the engine and metrics are the same everywhere, and the
ranks decide alike. `Team` itself is the case of one process, in which nothing is divided; `Ranks` has several, whose
models are divided too (`trainer.sharding`).

In a divided model a pass is a meeting of all ranks: every layer is gathered from them. So each makes as many passes as
the others, with a pass over one token (`IDLE`) where it has no pack left, and packs that are computed at the same time
are of about the same length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sharpen.errors import SharpenError
from sharpen.trainer.packing import Pack, Segment, pack
from sharpen.trainer.sharding import whole
from sharpen.types import Experience

if TYPE_CHECKING:
    from sharpen.trainer.model import TrainedModel

Result = TypeVar("Result")

IDLE = Pack(
    ids_N=np.zeros(1, np.int64),
    positions_N=np.zeros(1, np.int64),
    segments=(Segment(start=0, stop=1, subtree_stop=1, parent=None),),
    predict_E=np.zeros(1, np.int64),
    targets_E=np.zeros(1, np.int64),
    logprobs_E=np.zeros(1, np.float32),
    advantages_E=np.zeros(1, np.float32),
    weights_E=np.zeros(1, np.float32),
    temperatures_E=np.ones(1, np.float32),
    versions_E=np.full(1, -1, np.int32),
    rollouts_E=np.zeros(1, np.int64),
    calls_E=np.zeros(1, np.int32),
    tokens_E=np.ones(1, np.int64),
    rollout_ids=("idle",),
    num_sequences=0,
    num_sequence_tokens=0,
)
"""What a rank without a pack sends through the model. It must have no effect."""

TIMEOUT_S = 1800.0
"""How long a rank waits for the others before it gives up."""


class Sized(Protocol):
    """Something that is computed in one pass."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that go through the model."""


Item = TypeVar("Item", bound=Sized)


class Team:
    """One process: it is the first rank of one, computes everything, and gathers nothing."""

    rank = 0
    size = 1

    def divide(self, model: TrainedModel, *, cpu_offload: bool, keep_head: bool = False) -> None:
        """Give each rank its part of a model that all have loaded; see `sharding.shard`."""

    def packs(self, experiences: Sequence[Experience], max_tokens: int) -> list[Pack]:
        """Micro-batches; see `packing.pack`. Several ranks get about equal ones, and none of them too few."""
        return pack(experiences, max_tokens)

    def map(self, items: Sequence[Item], compute: Callable[[Item], Result], idle: Callable[[], object]) -> list[Result]:
        """`compute` of each item, by the rank that has it; `idle` is the pass of a rank that has none left. Results
        must be on the CPU, and picklable."""
        del idle
        return [compute(item) for item in items]

    def gather(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Whole tensors by name, on the first rank; empty on the others. A parameter that comes twice stays one."""
        return {name: tensor.detach() for name, tensor in tensors}

    def agree(self, error: SharpenError | None) -> None:
        """Raise on every rank what the first one met."""
        if error is not None:
            raise error


class Ranks(Team):
    """Several processes, each of which has made the same calls."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        rendezvous: str,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Meet the other ranks at `rendezvous` (`file://PATH` on a file system that all see, or `tcp://HOST:PORT` of
        the first rank). `device` is `cpu` or this rank's own GPU, `cuda:<number>` as this process counts. Returns when
        all are there."""
        self.rank = rank
        self.size = size
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # so that the mesh finds a device chosen
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        self.mesh = init_device_mesh(device.type, (size,))

    def divide(self, model: TrainedModel, *, cpu_offload: bool, keep_head: bool = False) -> None:
        """See `Team.divide`."""
        model.shard(self.mesh, self.device, cpu_offload=cpu_offload, keep_head=keep_head)
        with torch.no_grad():
            model.score(IDLE)  # FSDP looks in the first pass which weights are trained: no adapter may be off then

    def packs(self, experiences: Sequence[Experience], max_tokens: int) -> list[Pack]:
        """Smaller ones than `max_tokens` allows, where the ranks would otherwise wait for the one with a pack more."""
        widest = pack(experiences, max_tokens)
        rounds = -(-len(widest) // self.size)
        if not widest or len(widest) == rounds * self.size:
            return widest
        share = sum(part.num_computed_tokens for part in widest) / (rounds * self.size)
        tried = [pack(experiences, min(max_tokens, int(share * slack) + 1)) for slack in (1.0, 1.15, 1.4)]
        return min([widest, *tried], key=self._cost)

    def map(self, items: Sequence[Item], compute: Callable[[Item], Result], idle: Callable[[], object]) -> list[Result]:
        """See `Team.map`."""
        mine: dict[int, Result] = {}
        for number in deal([item.num_computed_tokens for item in items], self.rank, self.size):
            if number is None:
                idle()
            else:
                mine[number] = compute(items[number])
        of_all: list[dict[int, Result]] = [{} for _ in range(self.size)]
        dist.all_gather_object(of_all, mine)
        found: dict[int, Result] = {}
        for of_rank in of_all:
            found |= of_rank
        return [found[number] for number in range(len(items))]

    def gather(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """One after the other, so that a rank has one whole tensor at a time; the first rank keeps them on its CPU."""
        found: dict[str, torch.Tensor] = {}
        of_parameter: dict[int, str] = {}
        for name, tensor in tensors:
            twin = of_parameter.setdefault(id(tensor), name) if isinstance(tensor, torch.nn.Parameter) else name
            if twin != name:
                if self.rank == 0:
                    found[name] = found[twin]
                continue
            full = whole(tensor.detach())
            if self.rank == 0:
                found[name] = full.cpu()
        return found

    def agree(self, error: SharpenError | None) -> None:
        """See `Team.agree`."""
        said: list[SharpenError | None] = [error]
        dist.broadcast_object_list(said, src=0)
        super().agree(said[0])

    def close(self) -> None:
        """Leave the others."""
        dist.destroy_process_group()

    def _cost(self, packs: Sequence[Pack]) -> int:
        """Tokens that the ranks wait for: of the longest pack of each round."""
        sizes = sorted((part.num_computed_tokens for part in packs), reverse=True)
        return sum(sizes[:: self.size])


def backward_nothing(policy: TrainedModel) -> None:
    """The pass of a rank that has no pack left, forward and backward: it adds 0 to the gradient."""
    logprobs_E = policy.score(IDLE).logprobs_E
    logprobs_E.backward(torch.zeros_like(logprobs_E))  # type: ignore[no-untyped-call]


def deal(sizes: Sequence[int], rank: int, num_ranks: int) -> list[int | None]:
    """The items of one rank in the order in which it computes them, None where it has none left.

    All ranks have as many; those computed at the same time are neighbours by size, so that the time that the ranks
    wait for each other is the least that a division of whole items allows.
    """
    order = sorted(range(len(sizes)), key=lambda number: (-sizes[number], number))
    rounds = -(-len(order) // num_ranks)
    mine: list[int | None] = [*order[rank::num_ranks]]
    return mine + [None] * (rounds - len(mine))
