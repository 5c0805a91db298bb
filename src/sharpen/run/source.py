"""The interface of a source of batches: the explorer's rollouts (`run.rollouts`) or rows (`run.rows`).

In: how far the run is. Out: a `StepOutcome` for each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sharpen.contracts import Rows
from sharpen.evidence.certificate.checks import broken_sentences
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.records import Delivery, TaughtRow
from sharpen.run.progress import Progress
from sharpen.show.monitor.display import Display
from sharpen.types import CallEntropies, Check, Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The results of a step. The loop adds the seconds and `tokens` per second to `metrics`; `counts` are added to
    those of `Progress`, `position` replaces its fields. `trained`, `delivered`, `entropies` and `taught` go into the
    journal; `reward`, `loss`, `flat`, `notes` and `shown` are for the display, the text `sample` and the rows
    `rollouts` for the monitor. `failure` is an error after the training, while weights were synced: the step itself is
    complete."""

    metrics: Mapping[str, float]
    tokens: int
    counts: Mapping[str, int]
    position: Mapping[str, Any]
    checks: Sequence[Check]
    trained: Sequence[Experience] = ()
    delivered: Delivery | None = None
    entropies: Sequence[CallEntropies] = ()
    taught: Sequence[TaughtRow] = ()
    reward: float | None = None
    loss: float | None = None
    flat: str = ""
    notes: Sequence[str | None] = ()
    shown: Mapping[str, float] = field(default_factory=dict)
    sample: str = ""
    rollouts: Rows = ()
    failure: BaseException | None = None


G = TypeVar("G")


class Source(Protocol[G]):
    """Where the batches of a run come from."""

    def gather(self, progress: Progress) -> G:
        """Return the data of the next step. An interrupt is safe here: nothing has been trained yet."""

    def train(self, gathered: G, progress: Progress) -> StepOutcome:
        """Certify the data, train on them, and sync the weights if they are due."""

    def serve(self) -> None:
        """Make the engine, if there is one, serve the trainer's weights, for an evaluation."""

    def close(self) -> None:
        """Cancel the work in flight."""


def record_checks(
    checks: Sequence[Check], step: int, journal: Journal, display: Display, *, stop: bool, trained: bool = False
) -> None:
    """Record the certificate's checks of a step that is about to train, or has `trained`. For a broken check, raises
    `CertificateError` if `stop` is set, else displays a warning."""
    journal.add_checks(step, checks)
    for line in broken_sentences(checks, stop=stop, trained=trained):
        display.message(f"  ! certificate: {line}")
