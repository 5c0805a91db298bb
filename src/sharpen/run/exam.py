"""What a model is put through before, during and after a run: the agent's tasks, and rows that are not trained on.

In: the evaluator and the held-out rows, as far as there are some. Out: a `Measurement`, logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sharpen.monitor.display import Display
from sharpen.monitor.metrics import Monitor
from sharpen.monitor.statistics import accuracy_metrics
from sharpen.run.evaluation import Evaluator
from sharpen.run.progress import Measurement
from sharpen.supervised.held_out import HeldOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """`evaluator` asks the agent, `held_out` measures the loss; None where there is nothing to ask or to measure.
    `serve` makes the engine serve the weights that are examined."""

    evaluator: Evaluator | None
    held_out: HeldOut | None
    serve: Callable[[], None]
    monitor: Monitor
    display: Display

    @property
    def exists(self) -> bool:
        """Whether there is anything to examine by."""
        return self.evaluator is not None or self.held_out is not None

    def take(self, name: str, *, step: int, version: int, with_further: bool) -> Measurement:
        """Examine the weights of this version, which `step` led to."""
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
