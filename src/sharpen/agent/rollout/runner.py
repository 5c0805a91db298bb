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
and is retried as one; its calls are divided among the rollouts (below). So it does where a rollout answered
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
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from sharpen.agent.rollout.choices import mark_unused, multi_choice_requests
from sharpen.agent.rollout.in_process import Attempt, AttemptRequest, AttemptRunner, Opener
from sharpen.agent.rollout.retries import Ending, is_final
from sharpen.config.run import RolloutConfig
from sharpen.config.secrets import hide
from sharpen.errors import ConfigError, RolloutError
from sharpen.types import MODEL_CAUSED, Call, CallStatus, Group, Outcome, Rollout, Task, noise_name

# Divides an attempt that made several rollouts into one attempt for each rollout.
#
# In: the attempt, with its recorded calls and the endings of the rollouts: all those of a group, or one and what it
# answered to other questions (`Ending.beside`). Out: an `Attempt` for each rollout, whose calls are numbered from 0.
# And the groups of the rollouts that answered other questions.
#
# A call belongs to the rollout that claims it, or that claims a call which continues it. Other calls (or all of them,
# if the attempt failed): choice k of a request belongs to rollout k, everything else to the first rollout.

V = TypeVar("V")
Part = tuple[int, str]
"""A rollout of an attempt: its number, and the name of the other question that it answers (`""` for the task)."""


def divide(attempt: Attempt, group_size: int) -> list[Attempt]:
    """Return the attempt of each rollout. Its counts are the mean over the rollouts."""
    calls, members = attempt.calls, attempt.ending.members or (attempt.ending,) * group_size
    endings = {(number, ""): ending for number, ending in enumerate(members)}
    endings |= {(number, name): part for number, one in enumerate(members) for name, part in one.beside.items()}
    owners = _owners(calls, endings)
    answers = attempt.num_answers if attempt.num_answers is None else -(-attempt.num_answers // group_size)
    counts = {name: count / group_size for name, count in attempt.counts.items()}

    def part(place: Part) -> Attempt:
        own = [call for call in calls if owners[call.index] == place]
        indices = {call.index: index for index, call in enumerate(own)}
        return Attempt(
            ending=_renumber_ending(endings[place], indices),
            calls=tuple(_renumber(call, calls, indices) for call in own),
            counts={} if place[1] else counts,
            seconds=attempt.seconds,
            started=attempt.started,
            num_answers=0 if calls or place[1] else answers,
        )

    return [
        dataclasses.replace(part((number, "")), beside={name: part((number, name)) for name in ending.beside})
        for number, ending in enumerate(members)
    ]


def side_groups(group: Group, beside: Sequence[Mapping[str, Rollout]]) -> Group:
    """Return the group with those at its side: for each other question, the rollouts that answered it, in order.

    `beside` has for each rollout of the group what it answered to other questions.
    """
    by_name: dict[str, list[Rollout]] = defaultdict(list)
    for named in beside:
        for name, rollout in named.items():
            place = len(by_name[name])
            by_name[name].append(dataclasses.replace(rollout, id=f"{rollout.group_id}/{place}", index=place))
    side = (
        dataclasses.replace(group, id=rollouts[0].group_id, rollouts=tuple(rollouts), attempts=(), baseline=None)
        for rollouts in by_name.values()
    )
    return dataclasses.replace(group, side=tuple(dataclasses.replace(one, beside=group.id) for one in side))


def _owners(calls: Sequence[Call], endings: Mapping[Part, Ending]) -> dict[int, Part]:
    """Return the rollout that each call belongs to, by the call's index."""
    owners = {index: place for place, ending in endings.items() for index in ending.calls}
    for call in reversed(calls):
        if call.index in owners and call.parent is not None:
            owners.setdefault(call.parent, owners[call.index])
    for call in calls:
        choice = 0 if call.request is None else call.index - call.request
        owners.setdefault(call.index, (choice if (choice, "") in endings else 0, ""))
    return owners


def _renumber(call: Call, calls: Sequence[Call], indices: Mapping[int, int]) -> Call:
    """Return the call with its new index; its parent is its nearest ancestor among the rollout's own calls."""
    parent = call.parent
    while parent is not None and parent not in indices:
        parent = calls[parent].parent
    choices = [one.index for one in calls if call.request is not None and one.request == call.request]
    own = [indices[index] for index in choices if index in indices]
    return dataclasses.replace(
        call,
        index=indices[call.index],
        parent=None if parent is None else indices[parent],
        request=min(own) if len(own) > 1 else None,
    )


def _renumber_ending(ending: Ending, indices: Mapping[int, int]) -> Ending:
    def renumbered(values: Mapping[int, V]) -> dict[int, V]:
        return {indices[index]: value for index, value in values.items() if index in indices}  # else not recorded

    return dataclasses.replace(
        ending,
        call_rewards=None if ending.call_rewards is None else renumbered(ending.call_rewards),
        trained=None if ending.trained is None else frozenset(indices[one] for one in ending.trained if one in indices),
        step_rewards=renumbered(ending.step_rewards),
        states=renumbered(ending.states),
    )


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
        frozen: Collection[str] = (),
    ) -> None:
        """`frozen`: the agents whose calls are answered by a policy that does not train."""
        self._attempts, self._frozen = attempts, frozen
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
        self._refuse_frozen(result.ending, result.calls)
        several = self._whole_groups or result.ending.beside
        results = divide(result, ticket.size) if several else [result]
        made = [self._made(ticket, ticket.index + place, attempt, part) for place, part in enumerate(results)]
        return tuple(made), result

    def _refuse_frozen(self, ending: Ending, calls: Sequence[Call]) -> None:
        """Raise `ConfigError` if the workflow asks that a call trains which another policy answered."""
        asked = (ending.trained or frozenset()) | (ending.call_rewards or {}).keys()
        named = {call.agent for call in calls if call.index in asked} | ending.beside.keys()
        if wrong := sorted(named & set(self._frozen)):
            raise ConfigError(
                f"call_rewards or train names {wrong[0]!r}, an agent whose policy does not train "
                f"(policies.{wrong[0]}): leave it out of both"
            )

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
        """Return the calls with those marked that asked for a side model, that another policy answered, or that the
        workflow left out; if it does not say which calls take part, mark the choices that it did not use."""
        calls = _leave_out(calls, {call.index for call in calls if not self._is_aside(call)})
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

    def _is_aside(self, call: Call) -> bool:
        return call.agent in self._frozen or any(
            fnmatch.fnmatchcase(call.model, pattern) for pattern in self._config.side_models
        )


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
