"""`sharpen serve --config FILE`: a model that is served and learns from its use, until it is told to end.

In: a run's configuration, the key, and how the trainer is started. Out: sessions become batches in the run's exchange,
for a trainer in another process (`run.receiver`); its weights are loaded as they come, while requests are running.

    applications ─► front ─► sessions ─► groups ─► exchange ─► trainer
                      ▲                                           │
                    engine ◄────────── published weights ◄────────┘
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from sharpen import __version__
from sharpen.agent.rollout.refill import StepRollouts
from sharpen.agent.tasks.order import distinct
from sharpen.config.load import ResolvedConfig
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError, RolloutError
from sharpen.interrupts import deferred_interrupt, stop_signals
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.experience.draw import left_out
from sharpen.learning.recipe import RolloutRecipe
from sharpen.models.identity import model_identity
from sharpen.placement.exchange.announcement import Announcement
from sharpen.placement.exchange.batch import SESSIONS, ExploredBatch
from sharpen.placement.exchange.store import Batches, Store, open_store
from sharpen.placement.exchange.weights import PublishedWeights, TrainerNote, read_note
from sharpen.placement.probe import probe_at_start, sample_probes
from sharpen.run.decide import decide_learning_server
from sharpen.run.explore import check_others, open_folder
from sharpen.serve.front import Front
from sharpen.serve.metrics import Metric, single
from sharpen.serve.openapi import SESSION_PATHS, document
from sharpen.serve.server import GRACE_S, Loaded, listening, loaded
from sharpen.serve.sessions import Sessions
from sharpen.serve.trainer import TrainerProcess, start_trainer
from sharpen.serve.visit import Visit
from sharpen.types import Experience, Group, IntArray, Task, id_of_group

LOOK_S = 0.2
"""How often the server looks for new weights, for sessions to save, and for a batch."""
_TASK = Task(id="probe", index=0, row={"text": "What is the capital of France, and how many people live there?"})
_TEACHES_NOTHING = (
    "no answer that may train (none was received, or all were sampled greedily, or by vLLM with top_p, top_k or min_p)"
)

_TASKS_ONLY = (
    *("workflow", "judge", "task_args", "workflow_args", "eval_dataset", "evaluation.", "rollout.", "check."),
    *("sampling.", "auxiliary_models", "train_dataset.total_epochs", "train_dataset.split"),
)
"""Settings that need tasks, and a workflow that is run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command adds to the configuration: the name of the model and the key for clients, when a session has
    been idle for too long, and the arguments of the trainer to start, None if it is started elsewhere."""

    name: str
    key: str
    idle_s: float
    trainer: Sequence[str] | None


def serve_and_learn(
    resolved: ResolvedConfig, options: Options, say: Callable[[str], None], config_path: Path | None = None
) -> None:
    """Serve until told to end. Raises `ConfigError` or `ModelError` for bad input, `EngineLostError` if the engine
    fails for good, `RolloutError` at the end if the trainer failed meanwhile."""
    job = decide_learning_server(resolved.config)
    config = job.config
    total = config.train_dataset.total_steps
    if total is None:
        raise ConfigError("train_dataset.total_steps is missing: how many steps the model learns from its use")
    run_dir = (Path(config.checkpoint_root_dir) / config.project / str(config.name)).absolute()
    identity = {"model": model_identity(job.folder)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_signals())
        store = stack.enter_context(
            contextlib.closing(open_store(config.exchange, run_dir, f"{config.project}/{config.name}"))
        )
        check_others(store, config, identity["model"], "server")
        for line in (
            *resolved.notices,
            *resolved.overrides,
            *job.notices,
            *_without_effect(resolved),
            *stack.enter_context(open_folder(run_dir / "explore", resolved, config_path, identity)),
        ):
            say(line)
        model = stack.enter_context(loaded(job, options.name, say))
        probe = probe_at_start(job, _Probing(model), [_TASK])
        announcement = Announcement.of(config, total_steps=total, model=identity["model"], probe=probe)
        check_others(store, config, identity["model"], "server")  # who has begun at the same time
        Batches(store).put(0, announcement.to_bytes())
        learning = _learning(job.recipe, model, store, run_dir, options, say)
        front = Front(
            model.gateway,
            learning.sessions,
            options.key,
            document(__version__, SESSION_PATHS),
            {("POST", "/sessions"): learning.sessions.open, ("POST", "/feedback"): learning.sessions.rate},
            learning.metrics,
        )
        if options.trainer is not None:
            learning.trainer = stack.enter_context(
                start_trainer(options.trainer, run_dir, run_dir / "explore" / "trainer.log", say)
            )
            say(f"trainer: {learning.trainer.log}")
        stack.enter_context(listening(front, model, config, say, learning.sessions))
        learning.run(front)
    learning.raise_if_failed()


def _learning(
    recipe: RolloutRecipe,
    model: Loaded,
    store: Store,
    run_dir: Path,
    options: Options,
    say: Callable[[str], None],
) -> Learning:
    """Return the loop, with the sessions of before a restart."""
    config = recipe.config
    sessions = Sessions(
        model.gateway,
        options.key,
        run_dir / "explore" / "sessions",
        idle_s=options.idle_s,
        group_size=config.algorithm.group_size,
    )
    note = read_note(store)
    if number := sessions.restore(Batches(store), 0 if note is None else note.trained):
        say(f"{number} sessions of before go on")
    return Learning(
        recipe=recipe, model=model, store=store, weights=PublishedWeights(store), sessions=sessions,
        say=say,
    )  # fmt: skip


def _without_effect(resolved: ResolvedConfig) -> list[str]:
    """Return a line that lists the given settings that have no effect in a server, if any."""
    idle = [name for name, origin in resolved.origins.items() if origin != "default" and name.startswith(_TASKS_ONLY)]
    return [f"without effect, since sessions come from applications: {', '.join(idle)}"] if idle else []


class _Probing:
    """What probes at the start need; see `placement.place.Serving`."""

    def __init__(self, model: Loaded) -> None:
        self.folder, self._thread, self._engine = model.folder, model.thread, model.engine

    def probe(self, prompt_ids_P: IntArray, *, noise: int, temperature: float) -> Future[tuple[Experience, ...]]:
        """See `Serving.probe`."""
        return self._thread.start(sample_probes(self._engine, prompt_ids_P, temperature=temperature, noise=noise))


@dataclass(slots=True, kw_only=True)
class Learning:
    """The loop of a server that learns, on the thread that started it."""

    recipe: RolloutRecipe
    model: Loaded
    store: Store
    weights: PublishedWeights
    sessions: Sessions
    say: Callable[[str], None]
    trainer: TrainerProcess | None = None
    _failed: bool = field(default=False, init=False)
    _complete: bool = field(default=False, init=False)
    _batches: int = field(default=0, init=False)
    _busy_s: float = field(default=0.0, init=False)

    def run(self, front: Front) -> None:
        """Look after sessions, batches and weights until told to end; then save what is there."""
        try:
            while not front.lost.wait(LOOK_S):
                with deferred_interrupt():  # a second Ctrl-C ends it at once
                    self._load_newer()
                    self.sessions.save()
                    self._make_batch()
                    self._look_at_trainer()
        except KeyboardInterrupt:
            self.say("ending: answering what is running, saving sessions, and waiting for the trainer's step")
            self.model.thread.call(front.end(GRACE_S))
        finally:
            time.sleep(LOOK_S)  # the last answers are on their way to their clients
            self.sessions.save()
        if front.lost.is_set():
            self.model.raise_lost()

    def metrics(self) -> Iterator[Metric]:
        """Yield what only a server that learns has to tell."""
        yield from self.sessions.metrics()
        yield single("batches_total", "counter", "Batches given to the trainer.", self._batches)
        if self.trainer is not None:
            yield single("trainer_running", "gauge", "Whether the trainer runs.", int(self.trainer.running))

    def raise_if_failed(self) -> None:
        """Raise `RolloutError` if the trainer ended with an error."""
        if self._failed and self.trainer is not None:
            raise RolloutError(
                f"the trainer had failed with exit code {self.trainer.exit_code}, so nothing was learnt since: "
                f"{self.trainer.log} says why"
            )

    def _load_newer(self) -> None:
        if (tensors := self.weights.newer()) is None:
            return
        name = (self.weights.session, self.weights.version)

        async def move() -> None:
            await self.model.engine.load(name[1], tensors)
            self.sessions.moved(name)

        self.model.thread.call(move())
        self.say(f"serving the weights of step {self.weights.step} (policy version {name[1]})")

    def _make_batch(self) -> None:
        """Give the trainer a batch, if it needs one and there is one."""
        total = self.recipe.config.train_dataset.total_steps
        assert total is not None
        batches = Batches(self.store)
        note, there = read_note(self.store), set(batches.numbers())
        trained = 0 if note is None else note.trained
        for refused, count in self.sessions.settle(trained, batches, there).items():
            self.say(f"the trainer refused batch {refused} (its output says why): its {count} sessions wait again")
        number = next((one for one in range(1, total + 1) if one not in there), None)
        if number is None:
            if trained >= total:
                self._forget_rest(total)
            return
        sizes = Sizes.of(self.recipe.config)
        if (chosen := self._choose(note, sizes)) is None:
            return
        used = [visit for members in chosen for visit in members]
        busy_s = self.model.gateway.busy.seconds()
        batch = make_batch(chosen, number, self.recipe.algorithm, sizes, generate_s=busy_s - self._busy_s)
        ids = [visit.id for visit in used]
        if not self.sessions.give(ids, number):
            return
        if not batches.put_new(number, batch.to_bytes()):  # another server was faster: the next number, then
            self.sessions.take_back(ids)
            return
        self._busy_s = busy_s
        self._batches += 1
        mean = sum(visit.reward or 0.0 for visit in used) / len(used)
        self.say(f"batch {number} of {total}: {len(used)} sessions, mean reward {mean:.3g}")

    def _choose(self, note: TrainerNote | None, sizes: Sizes) -> list[list[Visit]] | None:
        """Return the sessions of a batch with their calls, None if there are not enough; those that cannot be trained
        are removed."""
        usable = []
        for visit in self.sessions.rated():
            if reason := too_old(visit, note, self.recipe.schedule.max_staleness):
                self._leave_out(visit, reason)
            else:
                usable.append(visit)
        while (chosen := choose(usable, sizes)) is not None:
            loaded = [[self.sessions.with_calls(visit) for visit in members] for members in chosen]
            needs_ratio = self.recipe.algorithm.needs_ratio
            empty = [one for members in loaded for one in members if not teaches(one, needs_ratio=needs_ratio)]
            if not empty:
                return loaded
            for visit in empty:
                self._leave_out(visit, _TEACHES_NOTHING)
            gone = {visit.id for visit in empty}
            usable = [visit for visit in usable if visit.id not in gone]
        return None

    def _leave_out(self, visit: Visit, reason: str) -> None:
        self.say(f"session {visit.id} of task {visit.task.id} is not trained: {reason}")
        self.sessions.remove([visit])

    def _forget_rest(self, total: int) -> None:
        """All steps are trained: sessions are served, and what they were worth is of no use any more."""
        self.sessions.remove(self.sessions.rated())
        if not self._complete:
            self._complete = True
            self.say(f"all {total} steps are trained: serving goes on, and feedback has no effect any more")

    def _look_at_trainer(self) -> None:
        trainer = self.trainer
        if trainer is None or trainer.running or self._failed:
            return
        if trainer.exit_code:
            self._failed = True
            self.say(f"the trainer failed with exit code {trainer.exit_code}: {trainer.log} says why; serving goes on")


# Batches for the trainer, made of sessions that have ended and have a reward.
#
# In: sessions, in the order of their last use; the algorithm's sizes; how far the trainer is. Out: a batch, or none
# yet. The rule: the oldest `group_size` sessions of one task are a group; the first `batch_size` groups that are
# complete are a batch. With a group size of 1 every session is a group.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many groups are a batch, and how many sessions a group."""

    batch_size: int
    group_size: int

    @classmethod
    def of(cls, config: RunConfig) -> Sizes:
        """Those of a configuration."""
        return cls(batch_size=config.algorithm.batch_size, group_size=config.algorithm.group_size)


def too_old(visit: Visit, note: TrainerNote | None, max_staleness: float) -> str:
    """Return why a session cannot be trained any more; empty if it can."""
    if note is None:
        return ""
    if not all(note.leads_here(*weights) for weights in visit.weights):
        return "it was sampled by weights that an interrupted session of the trainer had trained"
    behind = note.version - min((version for _, version in visit.weights), default=note.version)
    return f"it is {behind} policy versions behind (sync.max_staleness)" if behind > max_staleness else ""


def teaches(visit: Visit, *, needs_ratio: bool) -> bool:
    """Whether a session has an answer that may train: none was received, or all were sampled greedily, or with top_p or
    top_k and no record of what these left, if not."""
    return any(call.trainable for call in visit.rollout("", "", 0, needs_ratio=needs_ratio).calls)


def choose(visits: Sequence[Visit], sizes: Sizes) -> list[list[Visit]] | None:
    """Return the groups of the next batch; None if there are not enough yet."""
    waiting: dict[str, list[Visit]] = {}
    groups = []
    for visit in visits:
        group = waiting.setdefault(visit.task.id, [])
        group.append(visit)
        if len(group) == sizes.group_size:
            groups.append(waiting.pop(visit.task.id))
        if len(groups) == sizes.batch_size:
            return groups
    return None


def make_batch(
    chosen: Sequence[Sequence[Visit]], number: int, algorithm: Algorithm, sizes: Sizes, *, generate_s: float
) -> ExploredBatch:
    """Return the chosen sessions as the batch of step `number`; `generate_s` as in `ExploredBatch`."""
    ids = distinct([id_of_group(number, members[0].task.id) for members in chosen])
    groups = tuple(
        Group(
            id=id_,
            task=members[0].task,
            version=min(one.version for one in members),
            rollouts=tuple(
                one.rollout(f"{id_}/{index}", id_, index, needs_ratio=algorithm.needs_ratio)
                for index, one in enumerate(members)
            ),
        )
        for id_, members in zip(ids, chosen, strict=True)
    )
    visits = [one for members in chosen for one in members]
    oldest, *further = sorted({name for one in visits for name in one.weights}, key=lambda name: name[1])
    began = min(one.opened for one in visits)
    rollouts = StepRollouts(
        groups=groups,
        batch_size=sizes.batch_size,
        usable=sum(left_out(group, algorithm) is None for group in groups),
        refill_rounds=0,
        seconds=time.time() - began,
        refill_s=0.0,
    )
    return ExploredBatch(
        rollouts=rollouts,
        session=oldest[0],
        version=oldest[1],
        order={SESSIONS: [one.id for one in visits]},
        generate_s=generate_s,
        further=tuple(further),
    )
