"""Runs workflows, many at a time, and returns groups of scored rollouts.

In: `Task`s, an `AttemptRunner`, a function that opens models. Out: `Group`s as futures. Threads: the caller's (which
may run its own event loop, as in a notebook), the runner's (only our code: slots, retries), and those of the
`AttemptRunner`.

    submit ─► group ─► rollout 0..G-1 ─► slot ─► attempt 0, 1, .. ─► [user loop: workflow ─► judge]
                                                     └─ time limit: revoke the session, cancel, continue

Failures that the model did not cause are retried (see `retries`), in a new session with the same noise, up to
`max_attempts`; then the rollout is excluded (no reward), and its siblings continue. Bad input stops everything, with
its own message, unless a rollout of these tasks has already ended well: then it is a failure like others.

If the workflow makes whole groups, one attempt makes all rollouts of a group and takes as many slots. It ends, fails
and is retried as one; `members` divides its calls among the rollouts. So it does where a rollout answered
further questions that are trained: those are groups at the side of the task's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import hashlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from sharpen.agent.rollout.choices import mark_unused, multi_choice_requests
from sharpen.agent.rollout.ending import Ending
from sharpen.agent.rollout.in_process import Attempt, AttemptRequest, AttemptRunner, Opener
from sharpen.agent.rollout.members import divide, side_groups
from sharpen.agent.rollout.retries import is_final
from sharpen.config.run import RolloutConfig
from sharpen.config.secrets import hide
from sharpen.errors import RolloutError
from sharpen.types import MODEL_CAUSED, Call, CallStatus, Group, Outcome, Rollout, Task, noise_name

log = logging.getLogger("sharpen.rollout")

OnRollout = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """One rollout to run, or `size` rollouts to run at once, with indices from `index` on."""

    task: Task
    group_id: str
    index: int
    opener: Opener
    evaluation: bool
    size: int = 1

    @property
    def id(self) -> str:
        return f"{self.group_id}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """One rollout, and what its workflow answered to other questions beside it."""

    rollout: Rollout
    beside: Mapping[str, Rollout]


class RolloutRunner:
    """Runs `group_size` rollouts of each task, with models that `open_session` opens. `whole_groups` is that of the
    `UserFunctions` which `attempts` run.

    Closing it also closes `attempts`. One runner serves the whole program, including evaluation (with its own
    `open_session`), since objects that user code keeps between rollouts belong to one event loop.
    """

    def __init__(
        self,
        attempts: AttemptRunner,
        open_session: Opener,
        config: RolloutConfig,
        group_size: int,
        seed: int,
        *,
        whole_groups: bool = False,
    ) -> None:
        self._attempts = attempts
        self._open_session = open_session
        self._config = config
        self._group_size = group_size
        self._seed = seed
        self._whole_groups = whole_groups
        self._fatal: Exception | None = None
        self._fatal_traceback: TracebackType | None = None
        self._warned_unused = False
        self._kept: set[str | None] = set()
        """The task sets of which a rollout has ended well: bad input there is that of a single rollout."""
        self._closed = False
        self._groups: set[asyncio.Task[Any]] = set()
        self._members: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(config.max_concurrent_rollouts)
        self._turn = asyncio.Lock()
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
        """Start a group. Rollouts start in the order of submission, as slots become free.

        `group_id` determines the noise, so it must be the same in a repeated run. `on_rollout` is called on the
        runner's thread with each finished rollout, and must be quick. `open_session` replaces the runner's own
        (evaluation). With `open_baseline` the group has one more rollout, its `baseline`, whose models that function
        opens. An `evaluation` does not retry failures that the model may have caused. The future raises `ConfigError`
        or `DatasetError` if any group had bad input.
        """
        if self._closed:
            raise RolloutError("the rollout runner is closed")
        size = self._group_size if group_size is None else group_size
        opener = open_session or self._open_session
        at_once = size if self._whole_groups else 1
        starts = [(index, opener, at_once) for index in range(0, size, at_once)]
        if open_baseline is not None:
            starts.append((size, open_baseline, 1))
        tickets = [
            _Ticket(task=task, group_id=group_id, index=index, opener=opener, evaluation=evaluation, size=count)
            for index, opener, count in starts
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
        """Wait for submitted groups. If one of them fails, or on Ctrl-C, all are cancelled."""
        try:
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            if self._fatal is not None:  # groups that it cancelled before they began do not raise it
                raise self._fatal_error()
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Cancel all rollouts, revoke their sessions and end the threads. May be called twice."""
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

    def _fatal_error(self) -> Exception:
        """Return the error that stopped everything, with its original traceback only, to be raised again."""
        assert self._fatal is not None
        return self._fatal.with_traceback(self._fatal_traceback)

    async def _cancel_all(self) -> None:
        """Cancel all groups and rollouts, and wait for them. Rollouts are cancelled too, since a group that is
        cancelled twice does not wait for its own."""
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
        """Run the tickets: the first `size` are the group, one after them is its baseline."""
        this = asyncio.current_task()
        assert this is not None
        this.add_done_callback(_retrieve)
        if self._fatal is not None:
            raise self._fatal_error()
        self._groups.add(this)
        members = [asyncio.create_task(self._rollouts(ticket, on_rollout), name=ticket.id) for ticket in tickets]
        for member in members:
            self._members.add(member)
            member.add_done_callback(self._members.discard)
        try:
            ended = await asyncio.gather(*members)
        except asyncio.CancelledError:
            if self._fatal is not None:
                raise self._fatal_error() from None
            raise
        except Exception as error:  # bad input, or a bug of ours: nothing can continue
            if self._fatal is None:
                self._fatal, self._fatal_traceback = error, error.__traceback__
            for other in (*members, *(self._groups - {this})):
                other.cancel()
            await asyncio.wait(members)
            raise
        finally:
            self._groups.discard(this)
        counted = [made for attempts in ended for made in attempts[-1]]
        group = Group(
            id=group_id,
            task=task,
            version=version,
            rollouts=tuple(made.rollout for made in counted[:size]),
            baseline=counted[size].rollout if len(counted) > size else None,
            attempts=tuple(made.rollout for attempts in ended for failed in attempts[:-1] for made in failed),
        )
        return side_groups(group, [made.beside for made in counted[:size]])

    async def _rollouts(self, ticket: _Ticket, on_rollout: OnRollout | None) -> list[tuple[_Made, ...]]:
        """Make all attempts of a ticket and return their rollouts. The last attempt counts."""
        attempts: list[tuple[_Made, ...]] = []
        failed = 0
        async with self._take_slots(ticket.size):
            while True:
                made, result = await self._attempt(ticket, len(attempts))
                attempts.append(made)
                failed += result.ending.counts_as_attempt
                if result.ending.outcome == Outcome.OK or failed >= self._config.max_attempts:
                    break
                if is_final(made[0].rollout, server_failed=result.ending.server_failed, evaluation=ticket.evaluation):
                    break
        if on_rollout is not None:
            for one in made:
                on_rollout(one.rollout)
        return attempts

    @contextlib.asynccontextmanager
    async def _take_slots(self, count: int) -> AsyncIterator[None]:
        """Hold `count` slots, at most all there are. Only one ticket at a time takes slots: two that each hold a part
        of theirs would wait for each other."""
        held = 0
        try:
            async with self._turn:
                for _ in range(min(count, self._config.max_concurrent_rollouts)):
                    await self._slots.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                self._slots.release()

    async def _attempt(self, ticket: _Ticket, attempt: int) -> tuple[tuple[_Made, ...], Attempt]:
        """Make one attempt, and return the records of its rollouts and its result."""
        request = AttemptRequest(
            task=ticket.task,
            rollout_id=ticket.id,
            noise_seed=noise_seed(self._seed, ticket.id),
            opener=ticket.opener,
            group_size=ticket.size,
        )
        result = await self._attempts.run(request)
        if result.ending.outcome == Outcome.OK:
            self._kept.add(ticket.task.task_set)
        elif result.ending.refusal is not None and ticket.task.task_set not in self._kept:
            raise result.ending.refusal
        assert self._whole_groups or not result.ending.members
        several = self._whole_groups or result.ending.beside
        results = divide(result, ticket.size) if several else [result]
        made = [self._made(ticket, ticket.index + place, attempt, part) for place, part in enumerate(results)]
        return tuple(made), result

    def _made(self, ticket: _Ticket, index: int, attempt: int, result: Attempt) -> _Made:
        beside = {
            name: self._record(ticket, f"{ticket.group_id}~{name}", index, attempt, part)
            for name, part in result.beside.items()
        }
        return _Made(rollout=self._record(ticket, ticket.group_id, index, attempt, result), beside=beside)

    def _record(self, ticket: _Ticket, group_id: str, index: int, attempt: int, result: Attempt) -> Rollout:
        """Return the record of one rollout."""
        ending, calls = result.ending, result.calls
        reward = self._config.failure_reward if ending.outcome in MODEL_CAUSED else ending.reward
        return Rollout(
            id=f"{group_id}/{index}",
            group_id=group_id,
            task_id=ticket.task.id,
            index=index,
            attempt=attempt,
            calls=self._mark_calls(calls, ending),
            outcome=ending.outcome,
            reward=reward,
            metrics={**result.counts, **ending.metrics},
            call_rewards=ending.call_rewards or {},
            step_rewards=ending.step_rewards,
            states=ending.states,
            error=None if ending.error is None else hide(ending.error),
            traceback=None if ending.traceback is None else hide(ending.traceback),
            seconds=result.seconds,
            started=result.started,
            unrecorded_answers=None if result.num_answers is None else result.num_answers if not calls else 0,
        )

    def _mark_calls(self, calls: tuple[Call, ...], ending: Ending) -> tuple[Call, ...]:
        """Return the calls with those marked that asked for a side model, or that the workflow left out; if it does not
        say which calls take part, mark the choices that it did not use."""
        calls = _leave_out(calls, {call.index for call in calls if not self._is_side_call(call)})
        if ending.trained is not None:
            calls = _leave_out(calls, ending.trained)
        if ending.call_rewards is not None:
            return _leave_out(calls, ending.call_rewards)
        if self._config.choices == "all":
            return calls
        marked = mark_unused(calls, ending.answer)
        for choices in multi_choice_requests(calls):
            if not self._warned_unused and all(marked[call.index].status == CallStatus.UNUSED for call in choices):
                self._warned_unused = True
                log.warning(
                    "a request asked for %d choices, and it is unknown which one the agent used: none of them is "
                    "trained. Continue from its message, or return its text as WorkflowOutput.response; for an agent "
                    "that uses all of them (a vote) set rollout.choices: all",
                    len(choices),
                )
        return marked

    def _is_side_call(self, call: Call) -> bool:
        return any(fnmatch.fnmatchcase(call.model, pattern) for pattern in self._config.side_models)


def _retrieve(group: asyncio.Task[Any]) -> None:
    """Retrieve a group's error, so that asyncio does not log it: the caller of `collect` gets the first one."""
    if not group.cancelled():
        group.exception()


def _leave_out(calls: Sequence[Call], kept: Container[int]) -> tuple[Call, ...]:
    """Mark used calls whose indices are not among those `kept` as LEFT_OUT."""
    return tuple(
        dataclasses.replace(call, status=CallStatus.LEFT_OUT)
        if call.status == CallStatus.USED and call.index not in kept
        else call
        for call in calls
    )


def noise_seed(seed: int, rollout_id: str) -> int:
    """Return the 64-bit key of a rollout's noise, a function of the arguments only.

    All attempts of a rollout share it: retries with new noise would sample until an answer suits the user's code.
    """
    key = f"{seed}|{noise_name(rollout_id)}|0".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())
