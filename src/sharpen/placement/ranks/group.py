"""The coordinator's side of a trainer of several processes, with the methods of the trainer in one process.

In: `Calls`, which reach a `RankTrainer` in each process. Out: the first rank's results, and the weights to publish. The
ranks hold the weights, and all reach the same decision whether to apply an update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sharpen.errors import RankError, SharpenError
from sharpen.interrupts import deferred_interrupt
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.work import Minibatch, TrainingBatch
from sharpen.types import Experience

if TYPE_CHECKING:
    import torch

    from sharpen.learning.trainer.gradients import Gradients
    from sharpen.learning.trainer.measured import StepMetrics
    from sharpen.learning.trainer.rounding import Rounding
    from sharpen.learning.trainer.row_loss import UpdateLoss


class Calls(Protocol):
    """How the coordinator calls the ranks of a trainer. Each process has one `RankTrainer`. An implementation decides
    where the processes run and how arguments and weights are transferred. Its constructor returns once all ranks have
    loaded their models.

    Requirements:

    - A call runs the same method with the same arguments on every rank, and returns when all have answered. The
      arguments (numpy records of some megabytes) are sent once, not once for each rank.
    - If every rank raises an error of `sharpen.errors`, the first rank's error is raised and the ranks stay usable:
      their weights are whole. Any other failure (a lost rank, an error on some ranks only, a missing answer) ends all
      ranks and raises `RankError`, which names the rank.
    - No process or file is left behind when the coordinator closes the ranks, dies or is killed.
    """

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a method of `RankTrainer` on every rank; return the answers in rank order."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights of `RankTrainer.give_weights` on the coordinator's CPU. The memory may be reused: they are
        valid until the next call."""

    def close(self) -> None:
        """End the ranks. May be called twice."""


StartRanks = Callable[[TrainerPlan], Calls]
"""Starts the ranks of a trainer outside this machine's processes."""


class TrainerGroup:
    """`trainer.trainer.Trainer` in several processes."""

    def __init__(self, ranks: Calls) -> None:
        """Use ranks that have loaded their models."""
        self._ranks = ranks
        self.version: int = self._call("attribute", "version")
        self.lines: tuple[str, ...] = self._call("attribute", "lines")
        self.rounding: Rounding | None = self._call("attribute", "rounding")

    def train_step(
        self, batches: Sequence[TrainingBatch], *, step: int | None = None, probe: Sequence[Experience] = ()
    ) -> StepMetrics:
        """See `Trainer.train_step`. Raises `RankError` too."""
        minibatches = [Minibatch(experiences=batch.experiences, experts=batch.experts) for batch in batches]
        metrics: StepMetrics = self._change("train_step", minibatches, step=step, probe=probe)
        return metrics

    def measure(self, experiences: Sequence[Experience]) -> UpdateLoss:
        """See `Trainer.measure`. Raises `RankError` too."""
        losses: UpdateLoss = self._call("run", "measure", experiences)
        return losses

    def gradients(self, experiences: Sequence[Experience], names: Collection[str] | None = None) -> Gradients:
        """See `Trainer.gradients`. Raises `RankError` too."""
        found: Gradients = self._call("run", "gradients", experiences, names)
        return found

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the weights to publish, unsharded, by Hugging Face name. They are valid until the next call."""
        with deferred_interrupt():
            return self._ranks.weights()

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint in the same form as a single process; see `Trainer.save`."""
        self._call("run", "save", directory, dict(position))

    def save_start(self, run_dir: Path) -> None:
        """See `Trainer.save_start`."""
        self._call("run", "save_start", run_dir)

    def restore(self, directory: Path) -> dict[str, Any]:
        """Continue from a checkpoint of any number of processes; see `Trainer.restore`."""
        position: dict[str, Any] = self._change("restore", directory)
        return position

    def back_to(self, version: int) -> bool:
        """See `Trainer.back_to`. Returns True if every rank restored back. Raises if ranks were lost, or if an earlier
        call was interrupted."""
        with deferred_interrupt():
            restored = all(self._ranks.call("run", "back_to", version))
        if restored:
            self.version = version
        return restored

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method and return the first rank's answer. Ctrl-C is deferred until all ranks have answered, since
        before that they could not even save a checkpoint."""
        with deferred_interrupt():
            return self._ranks.call(method, *arguments, **named)[0]

    def _change(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a trainer's method that may change the version, also if it raises."""
        lost = False
        try:
            return self._call("run", method, *arguments, **named)
        except SharpenError as error:
            lost = isinstance(error, RankError)
            raise
        finally:
            if not lost:
                self.version = self._call("attribute", "version")
