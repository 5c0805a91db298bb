"""A monitor that refuses, hangs or dies: the run goes on, and gets there what it can later."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sharpen.show.monitor.metrics import MAX_TRIES, MAX_WAITING, TolerantSink
from sharpen.show.monitor.tensorboard import TensorBoardSink


class Service:
    """Takes numbers, unless it is away; `held` holds every request until it is released."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.away = False
        self.never: set[int] = set()
        self.held: threading.Event | None = None
        self.closed = False

    def open(self) -> Service:
        self._answer()
        return self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._answer()
        if step in self.never:
            raise ValueError(f"step {step} is not wanted")
        self.taken.append(step)

    def close(self) -> None:
        self._answer()
        self.closed = True

    def _answer(self) -> None:
        if self.held is not None:
            self.held.wait()
        if self.away:
            raise ConnectionRefusedError("connection refused")


def place_of(service: Service, said: list[str], **options: Any) -> TolerantSink:
    return TolerantSink("W&B", service.open, said.append, **{"patience_s": 600.0, "close_s": 600.0, **options})


def log(place: TolerantSink, *steps: int) -> None:
    for step in steps:
        place.log(step, {"reward/mean": 0.5})


def test_what_was_refused_is_sent_later_in_order_and_said_once() -> None:
    service, said = Service(), list[str]()
    service.away = True
    place = place_of(service, said)
    log(place, 1, 2)
    service.away = False
    log(place, 3)
    service.away = True
    log(place, 4)
    service.away = False
    place.close()
    assert (service.taken, service.closed, place.missed) == ([1, 2, 3, 4], True, 0)
    (line,) = said
    assert "W&B could not be opened (ConnectionRefusedError: connection refused)" in line
    assert "refused" in place.line
    assert "later" in place.line


def test_what_never_came_is_counted_at_the_end() -> None:
    service, said = Service(), list[str]()
    place = place_of(service, said)
    log(place, 1)
    service.away = True
    log(place, 2, 3)
    place.close()
    assert (service.taken, place.missed) == ([1], 3)  # two steps, and its end
    assert place.line == "W&B missed 3 of 5 writes: metrics.jsonl has every number"


def test_a_write_that_is_never_taken_does_not_hold_those_after_it() -> None:
    service = Service()
    service.never = {2}
    place = place_of(service, [])
    log(place, *range(1, MAX_TRIES + 4))
    place.close()
    assert service.taken == [step for step in range(1, MAX_TRIES + 4) if step != 2]
    assert (place.missed, place.refused) == (1, MAX_TRIES)


def test_a_service_that_hangs_holds_neither_the_run_nor_its_end() -> None:
    """Red when writes are made on the caller's thread: this test does not end."""
    service = Service()
    place = place_of(service, [], patience_s=0.01, close_s=0.01)
    log(place, 1)
    service.held = threading.Event()
    log(place, *range(2, 2 * MAX_WAITING))
    place.close()
    assert place.missed >= MAX_WAITING
    service.held.set()  # its thread ends


@pytest.mark.timeout(60)
def test_it_is_waited_for_once_and_so_many_writes_wait() -> None:
    """Red when each call waits for a service that hangs (a second each), and when more, or fewer, writes wait: the
    oldest are left out."""
    service = Service()
    place = place_of(service, [], patience_s=1.0)
    log(place, 0)
    wait_until(service, 1)
    service.held = threading.Event()
    last = MAX_WAITING + 10
    log(place, *range(1, last + 1))
    service.held.set()
    wait_until(service, 1 + MAX_WAITING)
    place.close()
    assert place.missed == 10
    assert service.taken == [0, 1, *range(12, last + 1)]  # the first was in work
    assert service.closed


def wait_until(service: Service, num_taken: int) -> None:
    while len(service.taken) < num_taken:
        time.sleep(0.005)


def test_what_a_service_says_of_a_failure_is_told_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services repeat the key that they refuse. Red when the error is told as it is."""
    monkeypatch.setenv("WANDB_API_KEY", "the-key-of-the-owner")

    def refuses() -> Service:
        raise PermissionError("the-key-of-the-owner is not valid at https://me:hunter2hunter2@wandb.test")

    said: list[str] = []
    TolerantSink("W&B", refuses, said.append, patience_s=600.0, close_s=600.0).close()
    (line,) = said
    assert "(PermissionError: *** is not valid at https://***@wandb.test)" in line


class Between(TolerantSink):
    """Lets its thread finish all it has just before the last write is put."""

    service: Service

    def _put(self, write: Any, *rest: Any, **more: Any) -> None:
        if write.what == "be closed" and self.service.held is not None:
            self.service.held.set()
            with self._changed:
                self._changed.wait_for(lambda: self._idle)
        super()._put(write, *rest, **more)


def test_it_is_closed_even_if_its_thread_was_just_done() -> None:
    """Red when the end is announced before it is put: the thread ended, and nobody closed the service."""
    service = Service()
    place = Between("W&B", service.open, lambda said: None, patience_s=0.01, close_s=60.0)
    place.service = service
    service.held = threading.Event()
    log(place, 1)
    place.close()
    assert (service.taken, service.closed, place.missed) == ([1], True, 0)


def test_a_service_that_ends_its_thread_is_a_failure_like_others() -> None:
    def leaves() -> Service:
        raise SystemExit(1)

    said: list[str] = []
    place = TolerantSink("W&B", leaves, said.append, patience_s=600.0, close_s=600.0)
    log(place, 1)
    place.close()
    assert (place.missed, len(said)) == (3, 1)


def test_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    """Red when half a record stays: TensorBoard reads nothing after it."""

    class Full:
        """A file on a disk that has room for some bytes."""

        def __init__(self, file: Any, room: int) -> None:
            self._file, self.room, self.name = file, room, file.name

        def write(self, data: bytes) -> int:
            written = self._file.write(data[: self.room])
            self.room -= written
            return int(written)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    sink = TensorBoardSink(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.stat().st_size
    file = sink._file
    sink._file = Full(file, 10)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        sink.log(1, {"reward/mean": 0.5})
    assert path.stat().st_size == whole
    sink._file = file
    sink.log(1, {"reward/mean": 0.5})
    sink.close()
    assert path.stat().st_size > whole
