"""The explorer's half of a run in two processes: rolls out batch after batch for a trainer elsewhere.

In: a resolved configuration with mode `explore`, the user's functions. Out: batches in the run's exchange, and nothing
trained. Before each batch it takes the newest weights that the trainer has published; without a trainer the model stays
as it is, which makes the exchange a collection of its rollouts. A batch that the trainer refused is rolled out again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sharpen.agent.rollout.refill import StepRollouts, num_sampled_tokens
from sharpen.agent.rollout.statistics import summarize
from sharpen.agent.rollout.user_loop import owner
from sharpen.agent.tasks.order import Order, make_order
from sharpen.config.load import ResolvedConfig, write_config, write_resolved
from sharpen.config.run import RunConfig
from sharpen.interrupts import stop_signals
from sharpen.learning.recipe import RolloutRecipe
from sharpen.machine import let_idle_workers_sleep
from sharpen.models.identity import Identity, model_identity
from sharpen.placement.exchange.announcement import Announcement
from sharpen.placement.exchange.batch import ExploredBatch
from sharpen.placement.exchange.store import EXPLORER, Batches, Store, open_store
from sharpen.placement.exchange.weights import PublishedWeights
from sharpen.placement.local import start_serving
from sharpen.placement.place import Serving
from sharpen.placement.probe import probe_at_start
from sharpen.run.data import read_tasks
from sharpen.run.decide import decide_rollouts
from sharpen.run.explorer import Explorer
from sharpen.run.identity import rows_identity
from sharpen.run.judging import check_floor
from sharpen.run.lock import locked
from sharpen.run.receiver import wait_for
from sharpen.run.same_run import IDENTITY, RunRecord, check_same_run, read_recorded
from sharpen.show.monitor.display import Display, StepReport
from sharpen.show.monitor.stream import lasting_output
from sharpen.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What an explorer did: `batches` it rolled out in this session, of `total` that the exchange holds now."""

    run_dir: Path
    batches: int
    total: int


def explore(
    resolved: ResolvedConfig,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    config_path: Path | None = None,
) -> Exploration:
    """Roll out all batches of the run that are not in its exchange yet. Raises what `tune()` raises."""
    config = resolved.config
    job = decide_rollouts(config, workflow, judge)
    check_floor(config, judge, partial(print, flush=True))
    data = read_tasks(job.recipe)
    identities = {"train_dataset": rows_identity(data.training), "model": model_identity(job.folder)}
    let_idle_workers_sleep()
    assert config.name is not None, "mode explore needs a name"
    run_dir = (Path(config.checkpoint_root_dir) / config.project / config.name).absolute()
    order = make_order(data.training, config.sampling, seed=config.seed, batch_size=config.algorithm.batch_size)
    total = config.train_dataset.total_steps or order.num_batches(config.train_dataset.total_epochs)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(
            contextlib.closing(open_store(config.exchange, run_dir, f"{config.project}/{config.name}"))
        )
        check_others(store, config, identities["model"], "explorer")
        lines = stack.enter_context(open_folder(run_dir / EXPLORER, resolved, config_path, identities))
        stack.enter_context(stop_signals())
        stack.enter_context(lasting_output(owner.get))
        display = stack.enter_context(contextlib.closing(Display(total, sys.stdout)))
        for line in (*resolved.notices, *resolved.overrides, *job.notices, *lines, *data.messages):
            display.message(line)
        serving = start_serving(job)
        stack.callback(serving.close)
        display.message(serving.line)
        probe = probe_at_start(job, serving, data.training)
        announcement = Announcement.of(config, total_steps=total, model=identities["model"], probe=probe)
        check_others(store, config, identities["model"], "explorer")  # who has begun at the same time
        batches = Batches(store)
        batches.put(0, announcement.to_bytes())
        exploring = _Exploring(
            recipe=job.recipe,
            tasks=data.training,
            order=order,
            total=total,
            serving=serving,
            batches=batches,
            weights=PublishedWeights(store),
            display=display,
        )
        done = exploring.run()
        held = len(batches.numbers())
        display.message(f"{done} batches rolled out; the exchange of {run_dir} holds {held} of {total}")
        return Exploration(run_dir=run_dir, batches=done, total=held)


def check_others(store: Store, config: RunConfig, model: Identity, what: str) -> None:
    """Raise `ConfigError` if what another one (`what`: an explorer, a server) announced here is another run: a trainer
    that begins later reads what the last one said, and would refuse it."""
    if (there := Batches(store).get(0)) is not None:
        who = f"this {what} and the one before it on the same exchange ({store.where})"
        Announcement.from_bytes(there).check(config, model, who=who)


@contextlib.contextmanager
def open_folder(
    path: Path, resolved: ResolvedConfig, config_path: Path | None, identities: Mapping[str, Identity]
) -> Iterator[list[str]]:
    """Hold the explorer's folder in the run's and note the settings there; yields what to tell the user. Raises
    `ConfigError` if another explorer holds it, or the run is another one."""
    path.mkdir(parents=True, exist_ok=True)
    with locked(path) as note:
        lines = [*filter(None, [note])]
        before = read_recorded(path)
        if before is not None:
            lines += check_same_run(path, before, RunRecord.of(resolved.config, identities))
        if config_path is not None:
            write_config(config_path, path / "config.yaml")
        noted = {f"{IDENTITY}{name}": dict(identity) for name, identity in identities.items()}
        write_resolved(path / "resolved.json", resolved, noted)
        yield lines


@dataclass(slots=True, kw_only=True)
class _Exploring:
    """The loop of an explorer."""

    recipe: RolloutRecipe
    tasks: Sequence[Task]
    order: Order
    total: int
    serving: Serving
    batches: Batches
    weights: PublishedWeights
    display: Display
    _done: int = field(default=0, init=False)

    def run(self) -> int:
        """Roll out what is missing, in ascending order; the number of batches rolled out."""
        self._restore_order()
        while (number := self._missing()) is not None:
            self._await_weights(number)
            began = time.perf_counter()
            generated_s = self.serving.generating_s()
            rollouts = self._roll_out(number)
            batch = ExploredBatch(
                rollouts=rollouts,
                session=self.weights.session,
                version=self.weights.version,
                order=self.order.state(),
                generate_s=self.serving.generating_s() - generated_s,
            )
            if self.batches.put_new(number, batch.to_bytes()):
                self._done += 1
                self._report(number, rollouts, time.perf_counter() - began)
            else:
                self.display.message(f"batch {number}: another explorer was faster; these rollouts are dropped")
        return self._done

    def _missing(self) -> int | None:
        there = set(self.batches.numbers())
        return next((number for number in range(1, self.total + 1) if number not in there), None)

    def _restore_order(self) -> None:
        """Go on with the tasks behind those of the last batch."""
        for number in reversed(self.batches.numbers()):
            if (content := self.batches.get(number)) is not None:  # the trainer may just have refused it
                self.order.restore(ExploredBatch.from_bytes(content).order)
                self.display.message(f"continuing after batch {number}")
                return

    def _await_weights(self, number: int) -> None:
        """Serve the newest weights; where `sync.max_staleness` bounds the age of tokens, wait until they are new
        enough for this batch."""
        schedule = self.recipe.schedule

        def new_enough() -> bool | None:
            self._load_newer()
            return True if number - 1 - self.weights.step <= schedule.max_behind else None

        wait_for(new_enough, f"the trainer, for weights that batch {number} may be sampled by", self.display.message)

    def _load_newer(self) -> None:
        if (tensors := self.weights.newer()) is not None:
            self.display.doing("syncing")
            self.serving.publish(self.weights.version, tensors)
            self.display.doing("")

    def _roll_out(self, number: int) -> StepRollouts:
        explorer = Explorer(
            self.recipe,
            serving=self.serving,
            tasks=self.tasks,
            order=self.order,
            total_steps=number,
            display=self.display,
            trained=number - 1,
            version=self.weights.version,
        )
        with contextlib.closing(explorer):
            return explorer.gather()

    def _report(self, number: int, rollouts: StepRollouts, seconds: float) -> None:
        found = summarize(rollouts.groups)
        tokens = sum(num_sampled_tokens(group) for group in rollouts.groups)
        notes = [*found.notes(needs_reward=self.recipe.needs_reward), rollouts.note()]
        self.display.step(
            StepReport(
                step=number,
                reward=None if found.reward_mean != found.reward_mean else found.reward_mean,
                tokens_per_s=tokens / seconds,
                seconds=seconds,
                flat=f"{found.num_flat_groups}/{found.num_groups}",
                note="; ".join(filter(None, [*notes, f"policy version {self.weights.version}"])),
            )
        )
