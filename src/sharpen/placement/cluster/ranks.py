"""The ranks of a trainer in actors, one for each GPU (or several that share CPUs), on one or more machines.

In: a `TrainerPlan` and placed actors. Out: `RayRanks`, which satisfies `placement.ranks.group.Calls`. Arguments are put
into the object store once, and each rank reads its arrays there. New weights stay there too: engines read them
directly, not through the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharpen.errors import RankError
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.team import Ranks
from sharpen.placement.cluster.engine import first_line, to_arrays, to_tensors
from sharpen.placement.ranks.answers import GRACE_S, RankAnswer, RankCalls, Reply, call_name, run_call
from sharpen.placement.ranks.rank import RankTrainer

if TYPE_CHECKING:
    import torch

_CLOSE_S = 10.0


class RankActor:
    """An actor with one rank of the trainer."""

    def __init__(self) -> None:
        warnings.filterwarnings(
            "ignore", message="The given NumPy array is not writable"
        )  # arrays of the object store are read-only
        self._trainer: RankTrainer | None = None

    def place(self) -> tuple[str, str, int]:
        """Return the machine's id, its address, and a free port there."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        return str(ray.get_runtime_context().get_node_id()), str(ray.util.get_node_ip_address()), port

    def load(self, plan: TrainerPlan, rank: int, size: int, rendezvous: str, num_threads: int) -> RankAnswer:
        """Load the models together with the other ranks."""
        return run_call(self._load, plan, rank, size, rendezvous, num_threads)

    def serve(self, call: tuple[str, Sequence[Any], Mapping[str, Any]]) -> RankAnswer:
        """Run a call of `RankTrainer`."""
        method, arguments, named = call
        return run_call(lambda: getattr(self._trainer, method)(*arguments, **named))

    def give_weights(self) -> tuple[RankAnswer, Any]:
        """Take part in gathering the published weights; the first rank returns them."""
        found: dict[str, torch.Tensor] = {}

        def take(name: str, tensor: torch.Tensor) -> None:
            found[name] = tensor.to("cpu", copy=True)

        trainer = self._trainer
        assert trainer is not None
        return run_call(lambda: trainer.give_weights(take)), to_arrays(found)

    def _load(self, plan: TrainerPlan, rank: int, size: int, rendezvous: str, num_threads: int) -> None:
        import torch

        from sharpen.models.files import quiet_transformers

        quiet_transformers()
        torch.set_num_threads(num_threads)
        if rendezvous.startswith("tcp://127.0.0.1:"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device = "cuda:0" if torch.cuda.is_available() else "cpu"  # Ray shows each actor only its own GPU
        ranks = Ranks(rank=rank, size=size, rendezvous=rendezvous, device=torch.device(device))
        self._trainer = RankTrainer(plan, ranks)


class StoredWeights(Mapping[str, "torch.Tensor"]):
    """Weights in the object store, fetched on first access."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self._tensors: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._fetch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetch())

    def __len__(self) -> int:
        return len(self._fetch())

    def _fetch(self) -> dict[str, torch.Tensor]:
        import ray

        if self._tensors is None:
            self._tensors = to_tensors(ray.get(self.reference))
        return self._tensors


class RayRanks(RankCalls):
    """Satisfies `ranks.group.Calls`. `close` ends the actors."""

    def __init__(self, plan: TrainerPlan, actors: Sequence[Any], *, grace_s: float = GRACE_S) -> None:
        """Wait until all ranks have loaded their models. Raises what they raise, or `RankError`."""
        import ray
        import torch

        super().__init__(grace_s)
        self._actors = list(actors)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            places = ray.get([actor.place.remote() for actor in actors])
            _, address, port = places[0]
            one_machine = len({node for node, _, _ in places}) == 1
            rendezvous = f"tcp://{'127.0.0.1' if one_machine else address}:{port}"
            threads = max(1, torch.get_num_threads() // len(actors)) if one_machine else torch.get_num_threads()
            size = len(actors)
            loads = [actor.load.remote(plan, rank, size, rendezvous, threads) for rank, actor in enumerate(actors)]
            self._answers(loads, "loading the models")
            undo.pop_all()

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """See `Calls.call`."""
        import ray

        self._check_open()
        message = ray.put((method, arguments, named))
        return self._answers([actor.serve.remote(message) for actor in self._actors], call_name(method, arguments))

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Calls.weights`."""
        self._check_open()
        pairs = [actor.give_weights.options(num_returns=2).remote() for actor in self._actors]
        self._answers([answer for answer, _ in pairs], "give_weights")
        return StoredWeights(pairs[0][1])

    def close(self) -> None:
        """See `Calls.close`."""
        import ray

        if self._broken is None:  # leave the process group in order
            closing = [actor.serve.remote(("close", (), {})) for actor in self._actors]
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        self._broken = self._broken or RankError("the trainer is closed")

    def _wait(self, handles: Sequence[Any], timeout_s: float | None) -> Sequence[Any]:
        """See `RankCalls`."""
        import ray

        ready: Sequence[Any] = ray.wait(handles, num_returns=1, timeout=timeout_s)[0]
        return ready

    def _receive(self, rank: int, handle: Any) -> Reply:
        """See `RankCalls`."""
        import ray
        from ray.exceptions import RayError

        try:
            answer: RankAnswer = ray.get(handle)
        except RayError as error:
            return f"was lost: {first_line(error)}"
        return answer
