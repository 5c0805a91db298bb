"""What the loop asks of a source of batches: the explorer's rollouts (`run.rollouts`), or rows (`run.rows`).

In: how far the run is. Out: a `StepOutcome` for each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sharpen.certificate.checks import broken_sentences
from sharpen.experience.journal import Journal
from sharpen.experience.records import Delivery, TaughtRow
from sharpen.monitor.display import Display
from sharpen.run.progress import Progress
from sharpen.types import Check, Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One step as it went. `metrics` lack what only the whole step has (its seconds, `tokens` per second); `counts` are
    added to those of `Progress`, `position` replaces its fields. `trained`, `delivered` and `taught` go into the
    journal, `reward`, `loss`, `flat` and `notes` are for people. `failure` is what ended the run behind the training,
    as weights moved: the step is whole all the same."""

    metrics: Mapping[str, float]
    tokens: int
    counts: Mapping[str, int]
    position: Mapping[str, Any]
    checks: Sequence[Check]
    trained: Sequence[Experience] = ()
    delivered: Delivery | None = None
    taught: Sequence[TaughtRow] = ()
    reward: float | None = None
    loss: float | None = None
    flat: str = ""
    notes: Sequence[str | None] = ()
    shown: Mapping[str, float] = field(default_factory=dict)
    failure: BaseException | None = None


G = TypeVar("G")


class Source(Protocol[G]):
    """Where the batches of a run come from."""

    def gather(self, progress: Progress) -> G:
        """What the next step trains on. Nothing of the run has changed yet: it may be interrupted."""

    def train(self, gathered: G, progress: Progress) -> StepOutcome:
        """Certify it, train on it, and move the weights if they are due."""

    def serve(self) -> None:
        """Make the engine, if there is one, serve the trainer's weights, for an evaluation."""

    def close(self) -> None:
        """Cancel what is in flight."""


def note_checks(checks: Sequence[Check], step: int, journal: Journal, display: Display, *, stop: bool) -> None:
    """Write down what the certificate says of a step that is about to train. Raises `CertificateError` for a broken
    check where the run is to `stop`, else says so."""
    journal.add_checks(step, checks)
    for line in broken_sentences(checks, stop=stop):
        display.message(f"  ! certificate: {line}")
