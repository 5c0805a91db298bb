import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sharpen.errors import CertificateError, CheckpointError
from sharpen.evidence.certificate.certificate import RepeatedSteps, Retrained
from sharpen.evidence.certificate.gradient_probe import GradientProbe
from sharpen.evidence.certificate.likeness import Gap
from sharpen.run.repeats import SHARE, Repeats, Size

SMALL = Size(num_weights=1_000_000, needed=100_000_000, free=10_000_000_000)
TOKENS = 1_000.0


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@dataclass
class Trainer:
    """A trainer whose state is a file with the step after which it was saved."""

    saved: list[str] = field(default_factory=list)
    full: bool = False

    def save(self, directory: Path, position):
        if self.full:
            raise CheckpointError("no space left on the device")
        directory.mkdir(parents=True)
        (directory / "state").write_text(directory.name)
        self.saved.append(directory.name)


@dataclass
class Journal:
    found: list[tuple[int, Retrained]] = field(default_factory=list)
    flushed: int = 0

    def flush(self):
        self.flushed += 1

    def add_repeated(self, step, found):
        self.found.append((step, Retrained.from_json(json.loads(json.dumps(found)))))

    @property
    def repeated(self):
        return [step for step, found in self.found if found.repeated]

    @property
    def reasons(self):
        return [sentence for _, found in self.found for sentence in found.not_repeated]


@dataclass
class Job:
    """A process that takes `takes` seconds of the clock. It reads what was kept for it, when it starts."""

    clock: Clock
    takes: float
    step: int
    before: str | None
    after: str
    problem: str | None = None
    reason: str | None = None
    closed: bool = False
    began: float = 0.0

    @property
    def ended(self):
        return self.clock.now >= self.began + self.takes

    @property
    def seconds(self):
        return min(self.takes, self.clock.now - self.began)

    def wait(self, seconds):
        self.clock.now += min(seconds, max(0.0, self.began + self.takes - self.clock.now))
        return self.ended

    def result(self):
        step = RepeatedSteps(first=self.step, last=self.step, cosine=1.0, length=1.0, furthest="layer", share=0.2)
        if self.reason is not None:
            return Retrained(not_repeated=(self.reason,))
        return Retrained(repeated=(step,), problems=() if self.problem is None else (self.problem,))

    def close(self):
        self.closed = True


class Run:
    """A run of `steps` steps of `step_s` seconds, with evaluations of `evaluation_s`; a step that is made once more
    takes `job_s`."""

    def __init__(self, folder, *, steps=40, step_s=1.0, evaluation_s=20.0, job_s=12.0, size=SMALL, done=0, **job):
        self.clock, self.trainer, self.journal = Clock(), Trainer(), Journal()
        self.jobs, self.lines, self.steps, self.step_s = [], [], steps, step_s
        self.evaluation_s, self.untrained, self.done, self.folder = evaluation_s, set(), done, folder
        self.gradients = GradientProbe(not_probed="nothing was compared")
        checkpoint = folder / f"global_step_{done}" if done else None
        if checkpoint is not None:
            checkpoint.mkdir()
            (checkpoint / "state").write_text("as it was loaded")

        def start(run_dir, step, before, after):
            read = [None if one is None else (one / "state").read_text() for one in (before, after)]
            self.jobs.append(Job(self.clock, job_s, step, *read, began=self.clock.now, **job))
            return self.jobs[-1]

        self.repeats = Repeats(
            self.trainer,
            self.journal,
            folder,
            size,
            checkpoint=checkpoint,
            total_steps=steps,
            time_limit_s=None,
            stop=True,
            say=self.lines.append,
            probe=lambda: self.gradients,
            start=start,
            clock=self.clock,
        )
        self.repeats.evaluation_s = evaluation_s

    def train(self):
        try:
            for step in range(self.done + 1, self.steps + 1):
                self.repeats.before(step)
                self.clock.now += self.step_s
                tokens = 0.0 if step in self.untrained else TOKENS
                self.repeats.after(step, tokens=tokens, seconds=self.step_s)
            self.clock.now += self.evaluation_s
            self.repeats.finish()
        finally:
            self.repeats.close()
        return self


def test_the_first_step_and_the_last_one_that_can_be_done_in_time_are_made_once_more(tmp_path):
    run = Run(tmp_path).train()
    assert run.journal.repeated == [1, 40]
    assert [(job.before, job.after) for job in run.jobs] == [
        (None, "global_step_1"),
        ("global_step_39", "global_step_40"),
    ]
    assert not (tmp_path / ".repeat").exists()
    assert run.clock.now == 60.0  # nothing was waited for


def test_where_the_last_one_would_not_be_done_in_time_an_earlier_one_is(tmp_path):
    run = Run(tmp_path, evaluation_s=0.0).train()
    first, last = run.journal.repeated
    assert first == 1
    assert 25 <= last <= 30  # 12 s before the end, which is 2 s after the 40th step


def test_on_long_runs_one_in_so_many_is_made_once_more_that_the_process_takes_a_twentieth_of_the_time(tmp_path):
    run = Run(tmp_path, steps=2_000).train()
    assert run.journal.repeated[:3] == [1, 242, 483]  # 12 s in each 241 s
    assert run.journal.repeated[-1] >= 1_999
    assert sum(job.takes for job in run.jobs) < 1.3 * SHARE * run.clock.now


def test_only_one_is_made_at_a_time(tmp_path):
    run = Run(tmp_path, steps=200, job_s=50.0).train()
    for earlier, later in zip(run.jobs, run.jobs[1:], strict=False):
        assert earlier.ended
        assert later.began >= earlier.began + earlier.takes


def test_a_run_that_is_too_short_says_so_and_waits_for_nothing(tmp_path):
    run = Run(tmp_path, steps=3, step_s=0.1, evaluation_s=0.2).train()
    assert run.jobs == []
    assert run.trainer.saved == []
    assert run.journal.reasons == [
        "the updates of steps 3: that takes about 9 s beside the run, which took only some 0 s more"
    ]


def test_the_run_waits_at_its_end_for_a_twentieth_of_its_time_and_no_longer(tmp_path):
    run = Run(tmp_path, steps=100, evaluation_s=0.0, job_s=1e9).train()
    assert run.clock.now == pytest.approx(100.0 * (1.0 + SHARE))
    assert run.jobs[0].closed
    assert run.journal.reasons == ["the updates of steps 1: that was not done when the run ended, after 104 s"]


def test_the_first_step_is_the_first_that_trains_something(tmp_path):
    run = Run(tmp_path)
    run.untrained = {1, 2}
    run.train()
    assert run.jobs[0].step == 3
    assert (run.jobs[0].before, run.jobs[0].after) == ("global_step_2", "global_step_3")


def test_a_continued_run_begins_with_the_checkpoint_that_was_loaded(tmp_path):
    run = Run(tmp_path, done=10).train()
    assert (run.jobs[0].step, run.jobs[0].before) == (11, "as it was loaded")
    assert (tmp_path / "global_step_10" / "state").read_text() == "as it was loaded"


def test_a_wrong_update_ends_the_run_and_names_the_layer(tmp_path):
    run = Run(tmp_path, problem="step 1: the weights are not those; furthest: layers.0.mlp")
    with pytest.raises(CertificateError, match=r"layers\.0\.mlp"):
        run.train()
    assert 12.0 < run.clock.now < 15.0
    assert run.journal.found[0][1].problems
    assert run.journal.flushed == 2  # before the process reads it, and before the error


def test_a_step_that_cannot_be_made_once_more_is_not_tried_again(tmp_path):
    run = Run(tmp_path, steps=500, reason="the updates of steps 1: the optimizer is muon").train()
    assert len(run.jobs) == 1
    assert run.journal.reasons == ["the updates of steps 1: the optimizer is muon"]


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (Size(num_weights=1, needed=8 * 2**30, free=2**30), "about 8.0 GiB of memory, and 1.0 GiB"),
        (Size(num_weights=0, needed=0, free=1), "no weights in safetensors"),
    ],
)
def test_too_little_memory_is_said_and_nothing_is_kept(tmp_path, size, why):
    run = Run(tmp_path, size=size).train()
    assert run.trainer.saved == []
    assert [why in reason for reason in run.journal.reasons] == [True]


LARGE = Size(num_weights=10**9, needed=10**11, free=10**10)


def test_of_a_model_that_is_too_large_the_gradients_of_some_blocks_are_compared_at_the_last_weights(tmp_path):
    run = Run(tmp_path, size=LARGE, steps=80)
    run.gradients = GradientProbe(gaps=(Gap(name="layer", distance=1.0, bound=4.0),), compared=0.1, num_tokens=99)
    run.train()
    (reason,) = run.journal.reasons
    assert "93.1 GiB of memory" in reason
    assert "those of a plain loop in 10% of the tensors" in reason
    short = Run(tmp_path, size=LARGE, steps=8)
    assert "radients" not in short.train().journal.reasons[0]


def test_wrong_gradients_at_the_last_weights_end_the_run(tmp_path):
    run = Run(tmp_path, size=LARGE, steps=80)
    run.gradients = GradientProbe(gaps=(Gap(name="layer.7", distance=9.0, bound=4.0),), compared=0.1, num_tokens=99)
    with pytest.raises(CertificateError, match=r"step 80: gradients at its weights: .*layer\.7"):
        run.train()
    assert run.journal.found[0][1].problems


def test_a_full_disk_does_not_end_the_run(tmp_path):
    run = Run(tmp_path)
    run.trainer.full = True
    run.train()
    assert run.jobs == []
    assert ["(no space left on the device)" in reason for reason in run.journal.reasons] == [True]


def test_what_a_killed_session_kept_is_removed(tmp_path):
    (tmp_path / ".repeat" / "global_step_7").mkdir(parents=True)
    Run(tmp_path).train()
    assert not (tmp_path / ".repeat").exists()
