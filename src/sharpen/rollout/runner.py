"""Runs workflows, many at a time, and gives groups of scored rollouts.

In: `Task`s, a place where attempts run, how their models are opened. Out: `Group`s as futures. Threads: the caller's
(which may run an event loop of its own, as in a notebook), the runner's (only our code: slots, retries), and those of
the place where attempts run.

    submit ─► group ─► rollout 0..G-1 ─► slot ─► attempt 0, 1, .. ─► [user loop: workflow ─► judge]
                                                     └─ time limit: revoke the session, cancel, go on

What is retried (`retries`): failures that the model did not cause, in a fresh session with the same noise, up to
`max_attempts`; then the rollout is excluded (no reward). Its siblings go on. Bad input stops everything, with its own
message.

A workflow that makes whole groups has one attempt for all rollouts of a group, which takes as many slots. It ends,
fails and is retried as one; its calls are cut into rollouts (`members`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from sharpen.config.run import RolloutConfig
from sharpen.errors import RolloutError
from sharpen.rollout.attempt import Ending
from sharpen.rollout.choices import only_used, requests
from sharpen.rollout.in_process import Attempt, AttemptRequest, AttemptRunner, Opener
from sharpen.rollout.members import cut, share
from sharpen.rollout.retries import is_final
from sharpen.types import MODEL_CAUSED, Call, CallStatus, Group, Outcome, Rollout, Task

log = logging.getLogger("sharpen.rollout")

OnRollout = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """One rollout to run, or `size` of them at once: the indices from `index` on."""

    task: Task
    group_id: str
    index: int
    opens: Opener
    evaluation: bool
    size: int = 1

    @property
    def id(self) -> str:
        return f"{self.group_id}/{self.index}"


class RolloutRunner:
    """Runs attempts of tasks, `group_size` rollouts of each, with models that `open_session` opens.

    Close it when done: that ends the place where `attempts` run, too. One runner serves a whole program (evaluation
    too, with an `open_session` of its own): what user code keeps between rollouts belongs to its loop.
    """

    def __init__(
        self,
        attempts: AttemptRunner,
        open_session: Opener,
        config: RolloutConfig,
        group_size: int,
        seed: int,
    ) -> None:
        self._attempts = attempts
        self._open_session = open_session
        self._config = config
        self._group_size = group_size
        self._seed = seed
        self._fatal: Exception | None = None
        self._fatal_place: TracebackType | None = None
        self._said_unused = False
        self._closed = False
        self._groups: set[asyncio.Task[Any]] = set()
        self._members: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(config.max_concurrent_rollouts)
        self._next = asyncio.Lock()
        self._thread = threading.Thread(target=self._serve, name="sharpen-rollouts", daemon=True)
        self._thread.start()

    def submit(
        self,
        task: Task,
        group_id: str,
        version: int,
        group_size: int | None = None,
        on_rollout: OnRollout | None = None,
        open_session: Opener | None = None,
        open_baseline: Opener | None = None,
        *,
        evaluation: bool = False,
    ) -> Future[Group]:
        """Start a group; rollouts start in the order of submission, as slots become free.

        `group_id` decides the noise, so it must be the same in a repeated run. `on_rollout` is called on the runner's
        thread with each finished rollout, and must be quick. `open_session` replaces the runner's own (evaluation);
        with `open_baseline` the group has one rollout more, its `baseline`, in a session of that kind. An `evaluation`
        repeats no failure that the model may have caused. The future raises `ConfigError` or `DatasetError` for bad
        input, in any group.
        """
        if self._closed:
            raise RolloutError("the rollout runner is closed")
        size = self._group_size if group_size is None else group_size
        opener = open_session or self._open_session
        at_once = size if self._attempts.whole_groups else 1
        begins = [(index, opener, at_once) for index in range(0, size, at_once)]
        if open_baseline is not None:
            begins.append((size, open_baseline, 1))
        tickets = [
            _Ticket(task=task, group_id=group_id, index=index, opens=opens, evaluation=evaluation, size=count)
            for index, opens, count in begins
        ]
        group = self._group(task, group_id, version, tickets, size, on_rollout)
        return asyncio.run_coroutine_threadsafe(group, self._loop)

    def run(
        self,
        tasks: Sequence[Task],
        *,
        group_ids: Sequence[str],
        version: int = 0,
        group_size: int | None = None,
        on_rollout: OnRollout | None = None,
        open_session: Opener | None = None,
        open_baseline: Opener | None = None,
        evaluation: bool = False,
    ) -> list[Group]:
        """Run a group for each task and wait for all of them. Ctrl-C cancels them."""
        return self.collect(
            [
                self.submit(
                    task, group_id, version, group_size, on_rollout, open_session, open_baseline, evaluation=evaluation
                )
                for task, group_id in zip(tasks, group_ids, strict=True)
            ]
        )

    def collect(self, futures: Sequence[Future[Group]]) -> list[Group]:
        """Wait for groups that were submitted; they are cancelled if one of them fails, or by Ctrl-C."""
        try:
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            if self._fatal is not None:  # the groups that it cancelled know nothing of it, if they had not begun
                raise self._fatal_again()
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Cancel what runs, revoke its sessions, end the threads. May be called twice."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._attempts.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> RolloutRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _fatal_again(self) -> Exception:
        """The error that stopped everything, to be raised once more: with the traceback of its first time alone."""
        assert self._fatal is not None
        return self._fatal.with_traceback(self._fatal_place)

    async def _cancel_all(self) -> None:
        """Cancel what runs and wait for its end. Rollouts by themselves too: a group that was cancelled twice does not
        wait for its own."""
        while running := self._groups | self._members:
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    async def _group(
        self,
        task: Task,
        group_id: str,
        version: int,
        tickets: Sequence[_Ticket],
        size: int,
        on_rollout: OnRollout | None,
    ) -> Group:
        """Run the tickets; the first `size` are the group, one behind them is its baseline."""
        this = asyncio.current_task()
        assert this is not None
        this.add_done_callback(_retrieve)
        if self._fatal is not None:
            raise self._fatal_again()
        self._groups.add(this)
        members = [asyncio.create_task(self._rollouts(ticket, on_rollout)) for ticket in tickets]
        for member in members:
            self._members.add(member)
            member.add_done_callback(self._members.discard)
        try:
            ended = await asyncio.gather(*members)
        except asyncio.CancelledError:
            if self._fatal is not None:
                raise self._fatal_again() from None
            raise
        except Exception as error:  # bad input, or a defect of ours: nothing can go on
            if self._fatal is None:
                self._fatal, self._fatal_place = error, error.__traceback__
            for other in (*members, *(self._groups - {this})):
                other.cancel()
            await asyncio.wait(members)
            raise
        finally:
            self._groups.discard(this)
        counted = [rollout for attempts in ended for rollout in attempts[-1]]
        return Group(
            id=group_id,
            task=task,
            version=version,
            rollouts=tuple(counted[:size]),
            baseline=counted[size] if len(counted) > size else None,
            attempts=tuple(rollout for attempts in ended for failed in attempts[:-1] for rollout in failed),
        )

    async def _rollouts(self, ticket: _Ticket, on_rollout: OnRollout | None) -> list[tuple[Rollout, ...]]:
        """All attempts of a ticket, the one that counts last."""
        attempts: list[tuple[Rollout, ...]] = []
        failed = 0
        async with self._taken(ticket.size):
            while True:
                rollouts, came = await self._attempt(ticket, len(attempts))
                attempts.append(rollouts)
                failed += came.ending.counts
                if came.ending.outcome == Outcome.OK or failed >= self._config.max_attempts:
                    break
                if is_final(rollouts[0], outside=came.ending.outside, evaluation=ticket.evaluation):
                    break
        if on_rollout is not None:
            for rollout in rollouts:
                on_rollout(rollout)
        return attempts

    @contextlib.asynccontextmanager
    async def _taken(self, count: int) -> AsyncIterator[None]:
        """Hold so many slots, or all that there are. They are taken in turn: nobody waits with a part of his."""
        held = 0
        try:
            async with self._next:
                for _ in range(min(count, self._config.max_concurrent_rollouts)):
                    await self._slots.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                self._slots.release()

    async def _attempt(self, ticket: _Ticket, attempt: int) -> tuple[tuple[Rollout, ...], Attempt]:
        """One attempt, as its rollouts are recorded and as it was made."""
        noise = noise_seed(self._seed, ticket.id)
        request = AttemptRequest(
            task=ticket.task, rollout_id=ticket.id, noise_seed=noise, opens=ticket.opens, group_size=ticket.size
        )
        came = await self._attempts.run(request)
        if not self._attempts.whole_groups:
            return (self._recorded(ticket, attempt, ticket.index, came),), came
        parts = cut(came.calls, came.ending.members or (came.ending,) * ticket.size)
        return tuple(
            self._recorded(ticket, attempt, ticket.index + number, share(came, calls, ending, ticket.size))
            for number, (calls, ending) in enumerate(parts)
        ), came

    def _recorded(self, ticket: _Ticket, attempt: int, index: int, came: Attempt) -> Rollout:
        """An attempt as the rollout that is recorded."""
        ending, calls = came.ending, came.calls
        reward = self._config.failure_reward if ending.outcome in MODEL_CAUSED else ending.reward
        return Rollout(
            id=f"{ticket.group_id}/{index}",
            group_id=ticket.group_id,
            task_id=ticket.task.id,
            index=index,
            attempt=attempt,
            calls=self._marked(calls, ending),
            outcome=ending.outcome,
            reward=reward,
            metrics={**came.noticed, **ending.metrics},
            call_rewards=ending.call_rewards or {},
            step_rewards=ending.step_rewards,
            states=ending.states,
            error=ending.error,
            seconds=came.seconds,
            unrecorded_answers=None if came.num_answers is None else came.num_answers if not calls else 0,
        )

    def _marked(self, calls: tuple[Call, ...], ending: Ending) -> tuple[Call, ...]:
        """The calls, with those marked that the workflow left out, or where it does not say which it used, the choices
        that it did not go on with."""
        if ending.call_rewards is not None:
            return _leave_out(calls, ending.call_rewards)
        if self._config.choices == "all":
            return calls
        marked = only_used(calls, ending.answer)
        for choices in requests(calls):
            if not self._said_unused and all(marked[call.index].status == CallStatus.UNUSED for call in choices):
                self._said_unused = True
                log.warning(
                    "a request for %d choices, of which nothing tells which one the agent used: none of them is "
                    "trained. Go on from its message, or return its text as WorkflowOutput.response; for an agent that "
                    "uses all of them (a vote) set rollout.choices: all",
                    len(choices),
                )
        return marked


def _retrieve(group: asyncio.Task[Any]) -> None:
    """Look at a group's error, so that asyncio does not log it: whoever waits for the groups has the first one."""
    if not group.cancelled():
        group.exception()


def _leave_out(calls: Sequence[Call], call_rewards: Mapping[int, float]) -> tuple[Call, ...]:
    """Mark the used calls that got no reward."""
    return tuple(
        dataclasses.replace(call, status=CallStatus.LEFT_OUT)
        if call.status == CallStatus.USED and call.index not in call_rewards
        else call
        for call in calls
    )


def noise_seed(seed: int, rollout_id: str) -> int:
    """The 64-bit key of a rollout's noise: a function of these two alone, whatever runs beside it. Each of its attempts
    has the same: a retry that sampled anew would draw until an answer suits the user's code."""
    key = f"{seed}|{rollout_id}|0".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())
