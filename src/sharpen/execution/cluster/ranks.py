"""The ranks of a trainer in actors, one for each GPU (or several that share CPUs), on one machine or more.

In: a `TrainerPlan` and placed actors. Out: `RayRanks`, which satisfies `execution.ranks.group.Calls`: arguments go
into the object store once, and each rank reads its arrays there. New weights stay there too: engines take them from the
first rank without a way through the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharpen.errors import RankError, SharpenError
from sharpen.execution.cluster.engine import first_line
from sharpen.execution.cluster.weights import to_arrays, to_tensors
from sharpen.execution.ranks.processes import GRACE_S, Answer
from sharpen.execution.ranks.trainer import RankTrainer
from sharpen.trainer.roles import TrainerPlan
from sharpen.trainer.team import Ranks

if TYPE_CHECKING:
    import torch

_CLOSE_S = 10.0
_SILENT = "did not answer and was ended"


class RankActor:
    """An actor: one rank of the trainer."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # the store's are not
        self._trainer: RankTrainer | None = None

    def place(self) -> tuple[str, str, int]:
        """The id of its machine, the machine's address, and a port that is free there."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        return str(ray.get_runtime_context().get_node_id()), str(ray.util.get_node_ip_address()), port

    def load(self, plan: TrainerPlan, rank: int, size: int, rendezvous: str, num_threads: int) -> Answer:
        """Load the models, together with the other ranks."""
        return self._answer(self._load, plan, rank, size, rendezvous, num_threads)

    def serve(self, call: tuple[str, Sequence[Any], Mapping[str, Any]]) -> Answer:
        """Make a call of `RankTrainer`."""
        method, arguments, named = call
        return self._answer(lambda: getattr(self._trainer, method)(*arguments, **named))

    def give_weights(self) -> tuple[Answer, Any]:
        """Take part in gathering the weights to act with; the first rank gives them."""
        found: dict[str, torch.Tensor] = {}

        def take(name: str, tensor: torch.Tensor) -> None:
            found[name] = tensor.to("cpu", copy=True)

        trainer = self._trainer
        assert trainer is not None
        return self._answer(lambda: trainer.give_weights(take)), to_arrays(found)

    def _load(self, plan: TrainerPlan, rank: int, size: int, rendezvous: str, num_threads: int) -> None:
        import torch

        from sharpen.execution.model_files import quiet_transformers

        quiet_transformers()
        torch.set_num_threads(num_threads)
        if rendezvous.startswith("tcp://127.0.0.1:"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device = "cuda:0" if torch.cuda.is_available() else "cpu"  # Ray shows each actor its own GPU alone
        ranks = Ranks(rank=rank, size=size, rendezvous=rendezvous, device=torch.device(device))
        self._trainer = RankTrainer(plan, ranks)

    def _answer(self, serve: Any, *arguments: Any) -> Answer:
        try:
            return Answer(result=serve(*arguments))
        except SharpenError as error:
            return Answer(error=error)
        except Exception as error:  # whatever is not ours is a failure of this rank
            line = f"{type(error).__name__}: {first_line(error)}"
            return Answer(failure=line, traceback=traceback.format_exc())


class StoredWeights(Mapping[str, "torch.Tensor"]):
    """Weights that lie in the object store; they are fetched when somebody looks into them."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self._tensors: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._fetched()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetched())

    def __len__(self) -> int:
        return len(self._fetched())

    def _fetched(self) -> dict[str, torch.Tensor]:
        import ray

        if self._tensors is None:
            self._tensors = to_tensors(ray.get(self.reference))
        return self._tensors


class RayRanks:
    """Satisfies `ranks.group.Calls`. `actors` are ended by `close`."""

    def __init__(self, plan: TrainerPlan, actors: Sequence[Any], *, grace_s: float = GRACE_S) -> None:
        """Returns when all ranks have loaded their models. Raises what they raise, or `RankError`."""
        import ray
        import torch

        self._actors = list(actors)
        self._grace_s = grace_s
        self._broken: BaseException | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            places = ray.get([actor.place.remote() for actor in actors])
            _, address, port = places[0]
            together = len({node for node, _, _ in places}) == 1
            rendezvous = f"tcp://{'127.0.0.1' if together else address}:{port}"
            threads = max(1, torch.get_num_threads() // len(actors)) if together else torch.get_num_threads()
            size = len(actors)
            loads = [actor.load.remote(plan, rank, size, rendezvous, threads) for rank, actor in enumerate(actors)]
            self._answers(loads, "loading the models")
            undo.pop_all()

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """See `Calls.call`."""
        import ray

        if self._broken is not None:
            raise self._broken
        letter = ray.put((method, arguments, named))
        what = arguments[0] if method == "run" else method
        return self._answers([actor.serve.remote(letter) for actor in self._actors], str(what))

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Calls.weights`."""
        if self._broken is not None:
            raise self._broken
        pairs = [actor.give_weights.options(num_returns=2).remote() for actor in self._actors]
        self._answers([answer for answer, _ in pairs], "give_weights")
        return StoredWeights(pairs[0][1])

    def close(self) -> None:
        """See `Calls.close`."""
        import ray

        if self._broken is None:  # they leave each other in order
            leaving = [actor.serve.remote(("close", (), {})) for actor in self._actors]
            ray.wait(leaving, num_returns=len(leaving), timeout=_CLOSE_S)
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        self._broken = self._broken or RankError("the trainer is closed")

    def _answers(self, references: Sequence[Any], what: str) -> list[Any]:
        """Every rank's answer; see `Calls.call` for errors."""
        try:
            answers = self._collect(references)
        except KeyboardInterrupt as error:
            self._broken = error  # answers of this call may still come: no further one can be made
            raise
        errors = [answer.error if isinstance(answer, Answer) else None for answer in answers]
        if all(error is not None for error in errors):
            assert errors[0] is not None
            raise errors[0]
        failed = [_failure(rank, answer) for rank, answer in enumerate(answers)]
        if any(failed):
            self._broken = RankError(
                f"the trainer's {'; '.join(filter(None, failed))} ({what}, {len(answers)} ranks). No checkpoint was "
                "touched: the same experiment_name continues from the last one"
            )
            if not any(isinstance(answer, str) and answer != _SILENT for answer in answers):
                traces = [answer.traceback for answer in answers if isinstance(answer, Answer) and answer.traceback]
                for trace in traces[:1]:  # where another one was lost they tell of that alone
                    self._broken.add_note(trace)
            self.close()
            raise self._broken
        return [answer.result for answer in answers if isinstance(answer, Answer)]

    def _collect(self, references: Sequence[Any]) -> list[Answer | str]:
        """What each rank says, or a line about a rank that is gone, or that does not answer within the time of grace
        after another one failed."""
        import ray
        from ray.exceptions import RayError

        answers: list[Answer | str] = [_SILENT] * len(references)
        open_ = {reference: rank for rank, reference in enumerate(references)}
        deadline: float | None = None
        while open_:
            limit_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(open_), num_returns=1, timeout=limit_s)
            if not ready:
                break
            rank = open_.pop(ready[0])
            try:
                answers[rank] = ray.get(ready[0])
            except RayError as error:
                answers[rank] = f"was lost: {first_line(error)}"
            if deadline is None and _failure(rank, answers[rank]):
                deadline = time.monotonic() + self._grace_s
        return answers


def _failure(rank: int, answer: Answer | str) -> str | None:
    """One line about a rank that gave no result; None if it did."""
    if isinstance(answer, str):
        return f"rank {rank} {answer}"
    failure = answer.failure or answer.error
    return None if failure is None else f"rank {rank} failed: {failure}"
