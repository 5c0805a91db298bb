"""Scheduling: slots, time limits, code that hangs, Ctrl-C, notebooks, and noise that depends on nothing but its key."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import line_of, python
from scripted_serving import FakeServing, MakeRunner, make_task

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import InProcess
from sharpen.agent.rollout.runner import RolloutRunner, noise_seed
from sharpen.agent.rollout.user_loop import BlockTimer, Run, UserLoop
from sharpen.config.run import RolloutConfig
from sharpen.errors import ConfigError, EngineLostError, RolloutError
from sharpen.types import Outcome, Rollout

LIMITS_S = (0.4, 4.0, 60.0)
"""Time limits of rollouts: where a loaded machine lets one pass too early, a longer one is tried."""


async def right(task: Any, model: Any) -> float:
    model.call()
    return 1.0


def test_trap_26_a_thousand_rollouts_within_the_limit_each_call_where_it_belongs(
    make_runner: MakeRunner, serving: FakeServing
) -> None:
    """Red when `_rollout` (runner.py) does not take a slot, or when sessions are shared between rollouts."""
    running = most = 0

    async def workflow(task: Any, model: Any) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(task["index"] % 3 + 1):
            model.call()
            await asyncio.sleep(0.001)
        running -= 1
        return float(task["index"])

    tasks = [make_task(n, index=n) for n in range(125)]
    runner = make_runner(workflow, max_concurrent_rollouts=32, group_size=8)
    seen: list[Rollout] = []
    groups = runner.run(tasks, group_ids=[f"0/{task.id}" for task in tasks], on_rollout=seen.append)
    assert most == 32
    assert len(seen) == 1000
    for n, group in enumerate(groups):
        assert group.task.index == n
        assert [rollout.reward for rollout in group.rollouts] == [float(n)] * 8
        assert [len(rollout.calls) for rollout in group.rollouts] == [n % 3 + 1] * 8
    # Started in order.
    assert serving.order == [f"0/train/{n}/{index}" for n in range(125) for index in range(8)]


def test_a_baseline_runs_beside_its_group_in_a_session_of_its_own(
    make_runner: MakeRunner, serving: FakeServing
) -> None:
    """Its reward is no rollout's of the group; a failed attempt of it is kept as of any other."""
    other = FakeServing()
    other.refuse = 1  # its first session cannot be opened
    runner = make_runner(right, group_size=2)
    (group,) = runner.run([make_task()], group_ids=["g"], open_baseline=other.open)
    assert [rollout.id for rollout in group.rollouts] == ["g/0", "g/1"]
    assert group.baseline is not None
    assert (group.baseline.id, group.baseline.reward, group.baseline.attempt) == ("g/2", 1.0, 1)
    assert [(rollout.id, rollout.outcome) for rollout in group.attempts] == [("g/2", Outcome.INFRASTRUCTURE)]
    assert (serving.order, other.order) == (["g/0", "g/1"], ["g/2"])
    (without,) = runner.run([make_task()], group_ids=["h"])
    assert without.baseline is None


def test_trap_25_noise_is_a_function_of_seed_group_and_index(make_runner: MakeRunner, serving: FakeServing) -> None:
    """Red when `_attempt` (runner.py) counts sessions instead of hashing the key."""
    tasks = [make_task(n) for n in range(6)]
    ids = [task.id for task in tasks]
    make_runner(right, max_concurrent_rollouts=1).run(tasks, group_ids=ids)
    first = {name: sessions[0].noise_seed for name, sessions in serving.sessions.items()}
    serving.sessions.clear()
    make_runner(right, max_concurrent_rollouts=12).run(tasks[::-1], group_ids=ids[::-1])
    assert {name: sessions[0].noise_seed for name, sessions in serving.sessions.items()} == first
    assert len(set(first.values())) == 12
    assert noise_seed(0, "train/0/0") == first["train/0/0"]
    assert noise_seed(1, "train/0/0") != first["train/0/0"]
    assert 0 <= noise_seed(0, "train/0/1") < 2**64


def test_a_workflow_that_never_returns_ends_at_its_time_limit(make_runner: MakeRunner, serving: FakeServing) -> None:
    async def workflow(task: Any, model: Any) -> float:
        model.call()
        if task["index"] == 0:
            await asyncio.Event().wait()
        return 1.0

    for timeout_s in LIMITS_S:
        runner = make_runner(workflow, timeout_s=timeout_s, max_attempts=2, group_size=1)
        hung, fine = runner.run([make_task(n, index=n) for n in range(2)], group_ids=["a", "b"])
        if fine.rollouts[0].outcome == Outcome.OK:
            break
    assert (hung.rollouts[0].outcome, hung.rollouts[0].reward) == (Outcome.TIMEOUT, None)
    assert f"time limit of {timeout_s:g} s" in str(hung.rollouts[0].error)
    assert "test_rollout_runner.py" in str(hung.rollouts[0].error)
    assert len(hung.rollouts[0].calls) == 1
    assert len(hung.attempts) == 1
    assert fine.rollouts[0].outcome == Outcome.OK
    assert timeout_s <= hung.rollouts[0].seconds < timeout_s + 120


def test_the_time_limit_includes_the_judge_and_starts_with_the_attempt(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> float:
        await asyncio.sleep(timeout_s / 10)
        return 1.0

    async def slow_judge(task: Any, response: Any) -> float:
        await asyncio.sleep(600)
        return 1.0

    # Twelve rollouts one after another take longer than the limit, none alone does.
    for timeout_s in LIMITS_S:
        runner = make_runner(workflow, timeout_s=timeout_s, max_concurrent_rollouts=1)
        group = runner.submit(make_task(), "g", 0, 12).result()
        if group.rollouts[-1].outcome == Outcome.OK and not group.attempts:
            break
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.OK] * 12
    timeout_s = 0.3
    group = make_runner(workflow, slow_judge, timeout_s=timeout_s, max_attempts=1).submit(make_task(), "g", 0).result()
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.TIMEOUT] * 2


def test_trap_27_an_ignored_cancellation_holds_nobody_up_and_its_key_is_revoked(
    make_runner: MakeRunner, serving: FakeServing, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when `_supervise` (runner.py) waits for the cancelled run, or does not close its session."""
    refused = threading.Event()
    release = threading.Event()

    async def workflow(task: Any, model: Any) -> float:
        model.call()
        while not release.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                try:
                    model.call()
                except ConnectionError:
                    refused.set()
        return 1.0

    runner = make_runner(workflow, timeout_s=0.4, max_attempts=2)
    with caplog.at_level(logging.WARNING, "sharpen.rollout"):
        group = runner.submit(make_task(), "g", 0).result(60)
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.TIMEOUT] * 2
    assert [len(rollout.calls) for rollout in group.rollouts] == [1, 1]
    assert refused.wait(120)
    assert len([record for record in caplog.records if "ignores its cancellation" in record.getMessage()]) == 1
    release.set()


def test_code_that_blocks_the_loop_is_named_and_the_others_continue(
    make_runner: MakeRunner, serving: FakeServing, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    async def workflow(task: Any, model: Any) -> float:
        model.call()
        await asyncio.sleep(0.05)
        if task["index"] == 1:
            release.wait(250)  # blocks the event loop
        await asyncio.sleep(0.05)
        return 1.0

    for timeout_s in LIMITS_S:
        runner = make_runner(workflow, timeout_s=timeout_s, max_attempts=2, group_size=1)
        with caplog.at_level(logging.WARNING, "sharpen.rollout"):
            groups = runner.run([make_task(n, index=n) for n in range(4)], group_ids=list("abcd"))
        if all(groups[n].rollouts[0].outcome == Outcome.OK for n in (0, 2, 3)):
            break
    culprit = groups[1].rollouts[0]
    assert (culprit.outcome, culprit.reward) == (Outcome.BLOCKED_LOOP, None)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# blocks the event" in text)
    assert f"test_rollout_runner.py:{line} in workflow" in str(culprit.error)
    assert len(groups[1].attempts) == 1
    for n in (0, 2, 3):
        assert groups[n].rollouts[0].outcome == Outcome.OK
        for attempt in groups[n].attempts:
            assert attempt.outcome == Outcome.INFRASTRUCTURE
            assert "rollout b/0 blocked the event loop" in str(attempt.error)
    assert any(f"test_rollout_runner.py:{line}" in record.getMessage() for record in caplog.records)
    release.set()


def test_a_short_block_is_warned_of_once_for_each_place(caplog: pytest.LogCaptureFixture) -> None:
    """The first rollout blocks until the warning is there, the second for long enough to earn another one."""

    async def workflow() -> float:
        first = not caplog.records
        for _ in range(3000 if first else 16):
            time.sleep(0.05)
            if first and caplog.records:
                break
        return 1.0

    watched = UserLoop(warn_after_s=0.3)
    runs = [Run(f"g/{index}", timeout_s=600.0) for index in range(2)]
    try:
        with caplog.at_level(logging.WARNING, "sharpen.rollout"):
            for run in runs:
                watched.start(run, workflow)
            assert [run.future.result() for run in runs] == [1.0, 1.0]
    finally:
        watched.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "in workflow blocks the event loop" in message
    assert "asyncio.to_thread" in message


def test_what_follows_the_users_code_is_not_called_its_blocking(caplog: pytest.LogCaptureFixture) -> None:
    """Red when `UserLoop._check` warns of a run that is resolved: the thread may be anywhere in our own code then."""
    watched = UserLoop(warn_after_s=0.3)
    run = Run("g/0", timeout_s=60.0)
    ended = threading.Event()
    run.future.add_done_callback(lambda _: time.sleep(0.8))  # on the loop's thread, once the result is there
    run.future.add_done_callback(lambda _: ended.set())
    try:
        with caplog.at_level(logging.WARNING, "sharpen.rollout"):
            watched.start(run, lambda: asyncio.sleep(0.0))
            assert ended.wait(60)
    finally:
        watched.close()
    assert not caplog.records


def test_a_first_import_is_not_taken_for_the_users_own_blocking(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red on the code before: 'blocks the event loop. Use an async call', of a line that imports."""
    (tmp_path / "slow_to_import.py").write_text("import slow_within\n")
    text = "import time\nimport said\nfor _ in range(3000):\n    if not said.records:\n        time.sleep(0.05)\n"
    (tmp_path / "slow_within.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "said", SimpleNamespace(records=caplog.records))

    async def workflow(task: Any, model: Any) -> float:
        import slow_to_import  # type: ignore[import-not-found]

        return float(bool(slow_to_import))

    with caplog.at_level(logging.WARNING, "sharpen.rollout"):
        make_runner(workflow, group_size=1).submit(make_task(), "g", 0).result()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "imports slow_to_import for the first time" in message
    assert "blocks the event loop" not in message


def test_time_without_cpu_does_not_count_as_blocking() -> None:
    """A watchdog that is 5 s late counts them as blocked if the loop's thread used the CPU (it held the interpreter),
    or if its CPU time is unknown; not if neither thread ran. Red on the code before: 5.2 s in all three."""
    for cpu_s, blocked_s in ((0.0, 0.3), (5.0, 5.2), (None, 5.2)):
        timer = BlockTimer()
        assert timer.update("task", 100.0, None if cpu_s is None else 0.0) == 0.0
        assert timer.update("task", 100.1, None if cpu_s is None else 0.0) == pytest.approx(0.1)
        assert timer.update("task", 105.2, cpu_s) == pytest.approx(blocked_s)
        assert timer.update("another", 105.3, cpu_s) == 0.0
        assert timer.update(None, 105.4, cpu_s) == 0.0


def test_blocking_agents_in_threads_run_side_by_side(make_runner: MakeRunner) -> None:
    together = threading.Barrier(40, timeout=60)

    async def workflow(task: Any, model: Any) -> float:
        await asyncio.to_thread(together.wait)
        return 1.0

    group = make_runner(workflow, group_size=40).submit(make_task(), "g", 0).result()
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.OK] * 40


def test_in_a_notebook_a_loop_already_runs_in_the_callers_thread(make_runner: MakeRunner) -> None:
    async def cell() -> None:
        runner = make_runner(right)
        (group,) = runner.run([make_task()], group_ids=["g"])
        assert group.rollouts[0].reward == 1.0
        group = await asyncio.wrap_future(runner.submit(make_task(), "h", 0))
        assert group.rollouts[0].reward == 1.0

    asyncio.run(cell())


def test_user_code_has_a_loop_and_thread_of_its_own(make_runner: MakeRunner) -> None:
    names: set[str] = set()

    async def workflow(task: Any, model: Any) -> float:
        names.add(threading.current_thread().name)
        return 1.0

    make_runner(workflow).submit(
        make_task(), "g", 0, on_rollout=lambda _: names.add(threading.current_thread().name)
    ).result()
    assert names == {"sharpen-user-code", "sharpen-rollouts"}


def test_cancelling_and_closing_revoke_what_runs(make_runner: MakeRunner, serving: FakeServing) -> None:
    begun: list[None] = []
    cancelled = threading.Event()

    async def workflow(task: Any, model: Any) -> float:
        try:
            begun.append(None)
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    runner = make_runner(workflow, max_concurrent_rollouts=2)
    futures = [runner.submit(make_task(n), f"g{n}", 0) for n in range(5)]
    while len(begun) < 2:
        time.sleep(0.01)
    assert futures[0].cancel()
    assert cancelled.wait(120)
    runner.close()
    assert all(future.cancelled() for future in futures)
    assert serving.all_closed
    with pytest.raises(RolloutError, match="closed"):
        runner.submit(make_task(), "g", 0)


def test_a_callback_that_fails_is_not_hidden(make_runner: MakeRunner) -> None:
    def callback(rollout: Rollout) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_runner(right).submit(make_task(), "g", 0, on_rollout=callback).result()


def test_signatures_are_checked_at_once(make_runner: MakeRunner) -> None:
    def synchronous(task: Any, model: Any) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="not async"):
        make_runner(synchronous)
    with pytest.raises(ConfigError, match="judge_func"):
        make_runner(right, right)


SCRIPT = """
import asyncio, sys, time
sys.path.insert(0, {folder!r})
from scripted_serving import FakeServing, make_task
from sharpen.config.run import RolloutConfig
from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import InProcess
from sharpen.agent.rollout.runner import RolloutRunner

async def workflow(task, model):
    print("started", flush=True)
    if task["index"] == 0:
        await asyncio.to_thread(time.sleep, 600)
    if task["index"] == 1:
        time.sleep(600)
    await asyncio.sleep(600)

runner = RolloutRunner(InProcess(UserFunctions(workflow, None), 60.0), FakeServing().open, RolloutConfig(), 1, 0)
try:
    runner.run([make_task(n, index=n) for n in range(2)], group_ids=["a", "b"])
except KeyboardInterrupt:
    runner.close()
    sys.exit(130)
"""


def test_ctrl_c_ends_promptly_whatever_the_workflows_do() -> None:
    code = SCRIPT.format(folder=str(Path(__file__).parent))
    with python("-c", code) as process:
        started = [line_of(process) for _ in range(2)]
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=250)
    assert (started, process.returncode) == (["started"] * 2, 130)
    assert time.monotonic() - began < 120
    assert errors == ""


def test_bad_input_is_raised_even_if_other_groups_had_not_begun(make_runner: MakeRunner) -> None:
    """Red (now and then) when `run` (runner.py) asks the futures before `_fatal`: the first may only be cancelled."""

    async def workflow(task: Any, model: Any) -> dict[str, str]:
        return {"not": "an output"}

    tasks = [make_task(number) for number in range(200)]
    with pytest.raises(ConfigError, match="returned"):
        make_runner(workflow).run(tasks, group_ids=[f"g{number}" for number in range(200)])


def test_bad_input_is_raised_without_the_frames_of_every_group(make_runner: MakeRunner) -> None:
    """Red when `_fatal_error` (runner.py) keeps the frames of each group that raised the error before."""

    async def workflow(task: Any, model: Any) -> dict[str, str]:
        return {"not": "an output"}

    with pytest.raises(ConfigError) as caught:
        make_runner(workflow).run([make_task(n) for n in range(50)], group_ids=[f"g{n}" for n in range(50)])
    assert len(traceback.extract_tb(caught.value.__traceback__)) < 20


def test_a_lost_engine_ends_everything_with_its_error_and_no_attempt_more() -> None:
    """Red when `run` (in_process.py) takes it for a failure of one rollout, to be tried again."""
    serving, lost = FakeServing(), threading.Event()

    def open_session(rollout_id: str, noise_seed: int) -> Any:
        if lost.is_set():
            raise EngineLostError("its processes died")
        return serving.open(rollout_id, noise_seed)

    async def workflow(task: Any, model: Any) -> float:
        while model.rollout_id.endswith("/0") and len(serving.order) < 3:
            await asyncio.sleep(0.001)
        if model.rollout_id.endswith("/0"):
            lost.set()
            raise ConnectionError("500")
        await asyncio.sleep(60)
        return 1.0

    runner = RolloutRunner(InProcess(UserFunctions(workflow, None), 60.0), open_session, RolloutConfig(), 3, 0)
    try:
        with pytest.raises(EngineLostError, match="its processes died"):
            runner.run([make_task()], group_ids=["g"])
    finally:
        runner.close()
    assert sorted(serving.order) == ["g/0", "g/1", "g/2"]
    assert serving.all_closed
