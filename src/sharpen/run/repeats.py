"""Which steps of a run are made once more while it trains (`certificate.retrain: auto`), and what comes of it.

In: the trainer before and after a step. Out: records in the journal, and `CertificateError` for a step whose weights
are not those that its updates make. Another process does it (`certificate.beside`), of one step at a time: the first
of each session that trains something, one in so many that the process takes at most `SHARE` of the time, and the last
one that can still be done when the run ends. The run waits for that one as long as `SHARE` of its time, no longer.
Where no step can be made once more, the gradient of a few sequences at the last weights is compared in its place.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sharpen.errors import CertificateError, CheckpointError
from sharpen.evidence.certificate.certificate import Retrained
from sharpen.evidence.certificate.plain.beside import RepeatedBeside, num_threads

SHARE = 0.05
"""How much of the run's time the process may take, and the run may wait for it."""

_FOLDER = ".repeat"
_LONG_S = 60.0
"""A run of less time is not made longer by comparing gradients at its end."""
_START_S = 8.0
"""What the process takes until it computes."""
_FLOPS = 4e10
"""Operations a second of a thread, until the first step was made once more and its time is known."""
_PER_TOKEN = 30.0
"""Operations for each token and weight: forward and backward are 6, made in the run's precision `likeness.TWINS` times
and once in a higher one, which counts twice."""


class Saves(Protocol):
    """The part of a trainer that is used here."""

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write its state."""


class Records(Protocol):
    """The part of a journal that is used here."""

    def flush(self) -> None:
        """Return once all records are on disk."""

    def add_repeated(self, step: int, found: Mapping[str, Any]) -> None:
        """Record what was found."""


class Job(Protocol):
    """A step that is being made once more: `certificate.beside.RepeatedBeside`."""

    step: int

    @property
    def ended(self) -> bool:
        """Whether there is a result."""

    @property
    def seconds(self) -> float:
        """How long it has taken."""

    def wait(self, seconds: float) -> bool:
        """Wait so long for the end, and return whether it has come."""

    def result(self) -> Retrained:
        """Return what was found."""

    def close(self) -> None:
        """End it now."""


class Gradients(Protocol):
    """A comparison of gradients: `certificate.gradient_probe.GradientProbe`."""

    @property
    def line(self) -> str:
        """What was found."""

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""


Start = Callable[[Path, int, "Path | None", Path], Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What decides whether and how fast a step can be made once more: the model's weights, the memory it takes and the
    memory that is free, in bytes."""

    num_weights: int
    needed: int
    free: int


class Repeats:
    """The steps of one session that are made once more."""

    def __init__(
        self,
        trainer: Saves,
        journal: Records,
        run_dir: Path,
        size: Size,
        *,
        checkpoint: Path | None,
        total_steps: int,
        time_limit_s: float | None,
        stop: bool,
        say: Callable[[str], None],
        probe: Callable[[], Gradients] | None = None,
        share: float = SHARE,
        start: Start = RepeatedBeside,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`checkpoint` is the one that this session continues from; `stop` is whether a wrong step ends the run;
        `probe` compares the trainer's gradients at its present weights."""
        self._trainer, self._journal, self._run_dir, self._size = trainer, journal, run_dir, size
        self._checkpoint, self._total_steps, self._stop, self._say = checkpoint, total_steps, stop, say
        self._limit_s, self._share, self._probe = time_limit_s, share, probe
        self._start, self._clock, self._began = start, clock, clock()
        self._folder = run_dir / _FOLDER
        self._job: Job | None = None
        self._last_s: float | None = None
        self._started_at = 0.0
        self._step_s = 0.0
        self._kept: tuple[int, Path | None] | None = None
        self._why, self._given_up = "", False
        if not size.num_weights:
            self._why = "the model has no weights in safetensors"
        elif size.needed > size.free:
            needed, free = size.needed / 2**30, size.free / 2**30
            self._why = f"that takes about {needed:.1f} GiB of memory, and {free:.1f} GiB were free"
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a session that was killed
        self.evaluation_s = 0.0
        """What an evaluation takes: the last one runs beside the last step that is made once more."""

    def before(self, step: int) -> None:
        """Keep the trainer's state if this step, which is about to train, is to be made once more."""
        if not self._is_due(step):
            return
        self._clear()
        begin = self._folder / f"global_step_{step - 1}"
        loaded = self._checkpoint if self._checkpoint is not None and self._checkpoint.name == begin.name else None
        if self._kept_whole(begin, loaded, needed=step > 1):
            self._kept = step, begin if begin.is_dir() else None

    def after(self, step: int, *, tokens: float, seconds: float) -> None:
        """Start to make a step once more that was kept before it, has trained so many `tokens` of sequences, and took
        so long; and take the result of an earlier one. Raises `CertificateError`."""
        self._step_s = seconds
        self._look()
        kept, self._kept = self._kept, None
        if kept is None or not tokens:
            return
        if self._last_s is None and (takes := self._estimate(tokens)) > (rest := self._rest_s(step)):
            self._why = f"that takes about {takes:.0f} s beside the run, which took only some {rest:.0f} s more"
            return
        after = self._folder / f"global_step_{step}"
        if not self._kept_whole(after):
            return
        self._journal.flush()
        self._job, self._started_at = self._start(self._run_dir, step, kept[1], after), self._clock()

    def finish(self) -> None:
        """The run is at its end: wait for the step that is being made once more, at most `SHARE` of the run's time.
        Raises `CertificateError`."""
        if self._job is not None:
            self._job.wait(self._share * (self._clock() - self._began))
            if not self._job.ended:
                step, took = self._job.step, self._job.seconds
                self._leave_out(step, f"that was not done when the run ended, after {took:.0f} s")
        self._look()
        if self._why:
            self._compare_gradients()

    def close(self) -> None:
        """End what is under way, and remove what was kept."""
        self._end()
        self._clear()

    def _is_due(self, step: int) -> bool:
        if self._job is not None or self._why or self._given_up:
            return False
        if self._last_s is None:
            return True
        rest_s = self._rest_s(step)
        if rest_s < self._last_s:
            return False
        is_last_chance = step == self._total_steps or rest_s - 2 * self._step_s < self._last_s
        return is_last_chance or self._clock() - self._started_at >= self._last_s / self._share

    def _kept_whole(self, folder: Path, loaded: Path | None = None, *, needed: bool = True) -> bool:
        """Keep the trainer's state, or the checkpoint that was `loaded`, so that loading is checked too. Return whether
        nothing that is needed is missing: a full disk does not end a run here."""
        try:
            if loaded is not None:
                shutil.copytree(loaded, folder, copy_function=_link)
            elif needed:
                self._trainer.save(folder, {})
        except (CheckpointError, OSError) as error:
            self._why = f"the state of the trainer could not be kept ({error})"
            return False
        return True

    def _rest_s(self, step: int) -> float:
        """How long the run goes on after a step, by the time that the last step took."""
        took = self._clock() - self._began
        rest_s = (self._total_steps - step) * self._step_s
        if self._limit_s is not None:
            rest_s = min(rest_s, max(0.0, self._limit_s - took))
        return rest_s + self.evaluation_s + self._share * (took + rest_s)

    def _estimate(self, tokens: float) -> float:
        return _START_S + tokens * self._size.num_weights * _PER_TOKEN / (_FLOPS * num_threads())

    def _look(self) -> None:
        """Take the result of the step that was made once more, if it is there."""
        if self._job is None or not self._job.ended:
            return
        found, step, self._last_s = self._job.result(), self._job.step, self._job.seconds
        self._end()
        self._journal.add_repeated(step, asdict(found))
        for one in found.repeated:
            self._say(one.line)
        for sentence in found.not_repeated:
            self._given_up = True
            self._say(f"not made once more: {sentence}")
        self._stop_if_wrong(found)

    def _stop_if_wrong(self, found: Retrained) -> None:
        """Say what is wrong. Raises `CertificateError` with it, if that is to end the run."""
        if found.problems and self._stop:
            self._journal.flush()
            raise CertificateError(
                f"the run certificate is broken: {'; '.join(found.problems)}. The weights of this run are not what its "
                "rollouts taught (certificate.on_violation: warn continues anyway)"
            )
        for sentence in found.problems:
            self._say(f"  ! certificate: {sentence}")

    def _compare_gradients(self) -> None:
        """In place of steps that cannot be made once more."""
        if self._probe is None or self._clock() - self._began < _LONG_S:
            self._leave_out(self._total_steps, self._why)
            return
        found = self._probe()
        self._leave_out(self._total_steps, f"{self._why}. Gradients at the last weights: {found.line}", found.problem)

    def _leave_out(self, step: int, reason: str, problem: str = "") -> None:
        """Record why a step was not made once more, and what is wrong all the same."""
        self._end()
        problems = (f"step {step}: gradients at its weights: {problem}",) if problem else ()
        found = Retrained(not_repeated=(f"the updates of steps {step}: {reason}",), problems=problems)
        self._journal.add_repeated(step, asdict(found))
        self._stop_if_wrong(found)

    def _end(self) -> None:
        if self._job is not None:
            self._job.close()
        self._job = None

    def _clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Give a file a second name, so that it stays when the first one is removed; copy it where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
