"""The evaluation of a model before, during and after a run: on the agent's tasks and on held-out rows.

In: the evaluator and the held-out rows, where the run has them. Out: a `Measurement`, logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sharpen.learning.supervised.held_out import HeldOut
from sharpen.run.evaluation import Evaluator
from sharpen.run.progress import Measurement
from sharpen.show.monitor.display import Display
from sharpen.show.monitor.metrics import Monitor
from sharpen.show.monitor.statistics import accuracy_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """`evaluator` runs the agent, `held_out` measures the loss; None where the run has no such tasks or rows. `serve`
    makes the engine serve the trainer's weights."""

    evaluator: Evaluator | None
    held_out: HeldOut | None
    serve: Callable[[], None]
    monitor: Monitor
    display: Display

    @property
    def exists(self) -> bool:
        """Whether the run has anything to evaluate on."""
        return self.evaluator is not None or self.held_out is not None

    def take(self, name: str, *, step: int, version: int, with_further: bool) -> Measurement:
        """Evaluate the weights of policy `version`, reached at `step`, and log the results."""
        rewards, numbers, rows = None, None, None
        if self.held_out is not None:
            measured = self.held_out.measure()
            numbers, rows = measured.numbers(), measured.by_row
            self.monitor.log(step, {f"eval/{key}": value for key, value in numbers.items()})
            self.display.message(f"evaluated {name}: held-out loss {numbers['loss']:.4f} on {numbers['rows']:g} rows")
        if self.evaluator is not None:
            self.serve()
            rewards = self.evaluator.evaluate(version, name=name, with_further=with_further)
            self.monitor.log(step, accuracy_metrics(rewards))
        return Measurement(rewards=rewards, loss=numbers, rows=rows)
