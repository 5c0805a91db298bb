"""A run that stands still says so once, with the places where it waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharpen.run.stall import StallWatch


async def wait_for_a_tool(event: asyncio.Event) -> None:
    await event.wait()


@contextlib.contextmanager
def a_rollout_that_waits() -> Iterator[None]:
    loop, event = asyncio.new_event_loop(), asyncio.Event()
    started = threading.Event()

    async def main() -> None:
        task = asyncio.create_task(wait_for_a_tool(event), name="3/train/7/0")
        waits = asyncio.create_task(event.wait(), name="3/train/7/0")  # as the runner's own task for the rollout
        await asyncio.sleep(0)
        started.set()
        await asyncio.gather(task, waits)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(event.set)
        thread.join()
        loop.close()


def test_a_standstill_is_reported_once_with_who_waits_and_a_way_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done, file = [0], tmp_path / "stalled.txt"
    watch = StallWatch(3600.0, lambda: done[0], file, "the run goes on. Ctrl-C ends it")
    began = time.monotonic()
    with contextlib.closing(watch), a_rollout_that_waits(), caplog.at_level(logging.WARNING, "sharpen.run"):
        assert not watch.look(began + 3000)
        done[0] += 1
        assert not watch.look(began + 3500)  # something was finished
        assert not watch.look(began + 7000)
        assert watch.look(began + 7200)
        assert not watch.look(began + 9000)  # once
        done[0] += 1
        assert not watch.look(began + 9001)
        assert watch.look(began + 13000)
    first, second = caplog.messages
    for line in (first, second):
        assert "rollout 3/train/7/0 waits at " in line
        assert "test_stall.py" in line
        assert "wait_for_a_tool" in line
        assert "the main thread is at" in line
        assert "Ctrl-C" in line
        assert str(file) in line
    stacks = file.read_text()
    assert "thread MainThread:" in stacks
    assert "task 3/train/7/0:" in stacks
    assert "in wait_for_a_tool" in stacks


def test_the_stacks_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-q8Zr71mCw0Vt9yLpXe3k")
    file = tmp_path / "stalled.txt"
    watch = StallWatch(3600.0, lambda: 0, file, "the run goes on")

    async def wait_for_a_tool() -> None:
        assert watch.look(time.monotonic() + 4000)

    async def main() -> None:
        await asyncio.create_task(wait_for_a_tool(), name="sk-q8Zr71mCw0Vt9yLpXe3k")

    with contextlib.closing(watch):
        asyncio.run(main())
    stacks = file.read_text()
    assert "wait_for_a_tool" in stacks
    assert "sk-q8Zr71mCw0Vt9yLpXe3k" not in stacks


def test_a_full_disk_does_not_keep_the_report_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch(3600.0, lambda: 0, tmp_path, "the run goes on")  # a folder: nothing can be written there
    with contextlib.closing(watch), caplog.at_level(logging.WARNING, "sharpen.run"):
        assert watch.look(time.monotonic() + 4000)
    assert "the stacks could not be written" in caplog.messages[0]
