"""The ranks that train one model together: they divide the packs of an update among themselves.

In: the packs of an update, and a function to compute for each. Out: all results on every rank, in the order of the
packs. Advantages, clipping, the comparison with the engine and metrics are therefore the same on every rank, and all
ranks decide alike. `Team` itself is a single process; `Ranks` is one of several, whose models are sharded
(`trainer.sharding`).

In a sharded model every layer is gathered from all ranks, so all of them must make the same number of passes. A rank
without a pack left makes a pass over one token (`IDLE`), and packs computed at the same time are similar in length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sharpen.engine.token_masks import TokenMasks
from sharpen.errors import SharpenError
from sharpen.learning.trainer.packing import Pack, Segment, pack
from sharpen.learning.trainer.sharding import whole
from sharpen.types import Experience

if TYPE_CHECKING:
    from sharpen.learning.trainer.model import TrainedModel

Result = TypeVar("Result")

IDLE = Pack(
    ids_N=np.ones(1, np.int64),  # 0 is mostly padding: an embedding of zeros, with no gradient of a magnitude
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
    truncated_E=np.zeros(1, np.bool_),
    rollout_ids=("idle",),
    num_sequences=0,
    num_sequence_tokens=0,
)
"""The pack that a rank without work sends through the model. It must have no effect."""

TIMEOUT_S = 1800.0
"""How long a rank waits for the others before it fails."""


class Sized(Protocol):
    """An item that is computed in one pass."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that go through the model."""


Item = TypeVar("Item", bound=Sized)


class Team:
    """A single process, which computes everything."""

    rank = 0
    size = 1

    def divide(self, model: TrainedModel, *, cpu_offload: bool, keep_head: bool = False) -> None:
        """Shard a model that every rank has loaded; see `sharding.shard`."""

    def packs(self, experiences: Sequence[Experience], max_tokens: int, masks: TokenMasks | None = None) -> list[Pack]:
        """Pack sequences; see `packing.pack`. For several ranks, choose the size of packs that balances their work."""
        return pack(experiences, max_tokens, masks=masks)

    def map(self, items: Sequence[Item], compute: Callable[[Item], Result], idle: Callable[[], object]) -> list[Result]:
        """Compute each item on one of the ranks, and return all results. `idle` makes the pass of a rank that has no
        item left. Results must be picklable, and tensors in them on the CPU."""
        del idle
        return [compute(item) for item in items]

    def gather(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return whole tensors by name on the first rank, and nothing on the others. A parameter with several names
        stays one tensor."""
        return {name: tensor.detach() for name, tensor in tensors}

    def agree(self, error: SharpenError | None) -> None:
        """Raise the error of the first rank on every rank."""
        if error is not None:
            raise error


class Ranks(Team):
    """One of several processes. All of them must make the same calls."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        rendezvous: str,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Connect to the other ranks at `rendezvous` (`file://PATH` on a shared file system, or `tcp://HOST:PORT` of
        the first rank), and wait until all are connected. `device` is `cpu` or this rank's own GPU, `cuda:<number>` as
        numbered in this process."""
        self.rank = rank
        self.size = size
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # makes it the current device for the mesh
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
            model.score(IDLE)  # FSDP notes in the first pass which weights are trained: adapters must be on

    def packs(self, experiences: Sequence[Experience], max_tokens: int, masks: TokenMasks | None = None) -> list[Pack]:
        """See `Team.packs`. If the packs cannot be dealt out evenly, smaller ones are tried, to reduce waiting."""
        largest = pack(experiences, max_tokens, masks=masks)
        rounds = -(-len(largest) // self.size)
        if not largest or len(largest) == rounds * self.size:
            return largest
        share = sum(part.num_computed_tokens for part in largest) / (rounds * self.size)
        limits = [min(max_tokens, int(share * slack) + 1) for slack in (1.0, 1.15, 1.4)]
        smaller = [pack(experiences, limit, masks=masks) for limit in limits]
        return min([largest, *smaller], key=self._cost)

    def map(self, items: Sequence[Item], compute: Callable[[Item], Result], idle: Callable[[], object]) -> list[Result]:
        """See `Team.map`."""
        mine: dict[int, Result] = {}
        for number in deal([item.num_computed_tokens for item in items], self.rank, self.size):
            if number is None:
                idle()
            else:
                mine[number] = compute(items[number])
        by_rank: list[dict[int, Result]] = [{} for _ in range(self.size)]
        dist.all_gather_object(by_rank, mine)
        results: dict[int, Result] = {}
        for rank_results in by_rank:
            results |= rank_results
        return [results[number] for number in range(len(items))]

    def gather(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """See `Team.gather`. Tensors are gathered one at a time, and kept in the CPU memory of the first rank."""
        gathered: dict[str, torch.Tensor] = {}
        first_names: dict[int, str] = {}
        for name, tensor in tensors:
            first = first_names.setdefault(id(tensor), name) if isinstance(tensor, torch.nn.Parameter) else name
            if first != name:
                if self.rank == 0:
                    gathered[name] = gathered[first]
                continue
            full = whole(tensor.detach())
            if self.rank == 0:
                gathered[name] = full.cpu()
        return gathered

    def agree(self, error: SharpenError | None) -> None:
        """See `Team.agree`."""
        errors: list[SharpenError | None] = [error]
        dist.broadcast_object_list(errors, src=0)
        super().agree(errors[0])

    def close(self) -> None:
        """Disconnect from the other ranks."""
        dist.destroy_process_group()

    def _cost(self, packs: Sequence[Pack]) -> int:
        """Return the number of tokens that determines the time: the sum over rounds of the longest pack."""
        sizes = sorted((part.num_computed_tokens for part in packs), reverse=True)
        return sum(sizes[:: self.size])


def backward_idle(policy: TrainedModel) -> None:
    """Make the forward and backward pass of a rank that has no pack left; it adds 0 to the gradient."""
    logprobs_E = policy.score(IDLE).logprobs_E
    logprobs_E.backward(torch.zeros_like(logprobs_E))  # type: ignore[no-untyped-call]


def deal(sizes: Sequence[int], rank: int, num_ranks: int) -> list[int | None]:
    """Return the numbers of one rank's items in the order of computation, with None once it has none left.

    All ranks get lists of equal length. Items computed at the same time are neighbours by size, which minimizes the
    time that ranks wait for each other.
    """
    order = sorted(range(len(sizes)), key=lambda number: (-sizes[number], number))
    rounds = -(-len(order) // num_ranks)
    mine: list[int | None] = [*order[rank::num_ranks]]
    return mine + [None] * (rounds - len(mine))
