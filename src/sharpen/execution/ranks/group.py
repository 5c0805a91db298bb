"""A trainer of several processes, seen from the coordinator: it has the methods of the trainer in one process.

In: `Calls`, which reach a `RankTrainer` in each process. Out: what the first rank answers, and the weights to act with.
The ranks hold the weights, and decide alike whether an update is made; the coordinator holds neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sharpen.errors import RankError, SharpenError
from sharpen.interrupts import deferred_interrupt
from sharpen.trainer.roles import TrainerPlan
from sharpen.trainer.work import Minibatch, TrainingBatch
from sharpen.types import Experience

if TYPE_CHECKING:
    import torch

    from sharpen.trainer.measured import StepMetrics
    from sharpen.trainer.rounding import Rounding
    from sharpen.trainer.row_loss import UpdateLoss


class Calls(Protocol):
    """How the coordinator reaches the ranks of a trainer. There is one `RankTrainer` in each process; where these
    processes are, and how arguments and weights travel, is all that an implementation decides. It exists once all ranks
    have loaded their models.

    What it must keep to:

    - A call runs the same method with the same arguments on every rank, and returns when all have answered. It sends
      the arguments once, cheaply (they are numpy records of some megabytes), not once for each rank.
    - If every rank raises an error of `sharpen.errors`, the first rank's is raised as itself and the ranks stay in
      use: they agreed on it, and their weights are whole. Any other failure (a rank that is lost, an error on some
      ranks only, an answer that never comes) ends all ranks and raises `RankError`, which names the rank.
    - Nothing is left behind when the coordinator closes them, dies or is killed.
    """

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """This method of `RankTrainer` on every rank; their answers, the first rank's first."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What `RankTrainer.give_weights` gives, on the coordinator's CPU. It may be the same memory each time: it
        holds until the next call."""

    def close(self) -> None:
        """End the ranks. Closing twice is fine."""


StartRanks = Callable[[TrainerPlan], Calls]
"""Starts the ranks of a trainer somewhere else than in processes of this machine."""


class TrainerGroup:
    """`trainer.trainer.Trainer` in several processes."""

    def __init__(self, ranks: Calls) -> None:
        """Take over ranks that have loaded their models."""
        self._ranks = ranks
        self.version: int = self._call("look", "version")
        self.lines: tuple[str, ...] = self._call("look", "lines")
        self.rounding: Rounding | None = self._call("look", "rounding")

    def train_step(
        self, batches: Sequence[TrainingBatch], *, step: int | None = None, probe: Sequence[Experience] = ()
    ) -> StepMetrics:
        """See `Trainer.train_step`. Raises `RankError` too."""
        travelling = [Minibatch(experiences=batch.experiences, experts=batch.experts) for batch in batches]
        metrics: StepMetrics = self._change("train_step", travelling, step=step, probe=probe)
        return metrics

    def measure(self, experiences: Sequence[Experience]) -> UpdateLoss:
        """See `Trainer.measure`. Raises `RankError` too."""
        losses: UpdateLoss = self._call("run", "measure", experiences)
        return losses

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        """The weights to act with, by their Hugging Face names, whole; they hold until the next call."""
        with deferred_interrupt():
            return self._ranks.weights()

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint, the same as one process writes; see `Trainer.save`."""
        self._call("run", "save", directory, dict(position))

    def restore(self, directory: Path) -> dict[str, Any]:
        """Continue from a checkpoint, of however many processes; see `Trainer.restore`."""
        position: dict[str, Any] = self._change("restore", directory)
        return position

    def back_to(self, version: int) -> bool:
        """See `Trainer.back_to`: whether every rank has its part of these weights. Raises as any call of ranks that
        were lost, or were left in the midst of a call."""
        with deferred_interrupt():
            went = all(self._ranks.call("run", "back_to", version))
        if went:
            self.version = version
        return went

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """The first rank's answer. Ctrl-C waits for all of them: until then the ranks can be asked for nothing else, so
        for no checkpoint either."""
        with deferred_interrupt():
            return self._ranks.call(method, *arguments, **named)[0]

    def _change(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call what may change the version; it may have even where it raises."""
        lost = False
        try:
            return self._call("run", method, *arguments, **named)
        except SharpenError as error:
            lost = isinstance(error, RankError)
            raise
        finally:
            if not lost:
                self.version = self._call("look", "version")
