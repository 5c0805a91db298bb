"""Evaluation: every task once greedy and once sampled, through the same workflow and judge as training.

In: a rollout runner, a session opener for each mode, and tasks. Out: an `Evaluation` (reward by task id). A rollout
that the model made fail gets the failure reward (0 if none is set), and so does a workflow that fails after the model
answered, for any cause: the agent did not do the task. Rollouts with other failures are left out and reported.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sharpen.agent.agentscope.console import silent_agents
from sharpen.agent.environments.opening import tasks_of
from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import Opener
from sharpen.agent.rollout.retries import fails_its_task
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.agent.rollout.statistics import RolloutStatistics, own_metrics, summarize, without_calls_note
from sharpen.config.load import ResolvedConfig, write_resolved
from sharpen.config.run import HELD_OUT, RunConfig
from sharpen.errors import ConfigError, RolloutError
from sharpen.files import check_writable, write_whole
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.records import EVALUATIONS
from sharpen.learning.supervised.held_out import HeldOut
from sharpen.placement.auxiliary.models import AuxiliaryModels, loading
from sharpen.placement.auxiliary.remote import RemoteModel
from sharpen.placement.local import start_serving
from sharpen.placement.serving import ServingThread
from sharpen.placement.sessions import attempt_runner, opener, own_arguments
from sharpen.run.decide import decide_endpoint, decide_evaluation
from sharpen.run.progress import Measurement
from sharpen.show.monitor.display import Display
from sharpen.show.monitor.figures import with_interval
from sharpen.show.monitor.metrics import Monitor
from sharpen.show.monitor.statistics import (
    Evaluation,
    accuracy,
    accuracy_metrics,
    distinct_rewards,
    distinct_values,
    evaluation_to_json,
)
from sharpen.types import Group, Mode, Outcome, Rollout, Task

# The evaluation of a model before, during and after a run: on the agent's tasks and on held-out rows.
#
# In: the evaluator and the held-out rows, where the run has them. Out: a `Measurement`, logged.


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """`evaluator` runs the agent, `held_out` measures the loss; None where the run has no such tasks or rows. `serve`
    makes the engine serve the trainer's weights."""

    evaluator: Evaluator | None
    held_out: HeldOut | None
    serve: Callable[[], None]
    monitor: Monitor
    display: Display

    @property
    def exists(self) -> bool:
        """Whether the run has anything to evaluate on."""
        return self.evaluator is not None or self.held_out is not None

    def take(self, name: str, *, step: int, version: int, with_further: bool) -> Measurement:
        """Evaluate the weights of policy `version`, reached at `step`, and log the results."""
        rewards, numbers, rows = None, None, None
        if self.held_out is not None:
            measured = self.held_out.measure()
            numbers, rows = measured.numbers(), measured.by_row
            self.monitor.log(step, {f"eval/{key}": value for key, value in numbers.items()})
            self.display.message(f"evaluated {name}: held-out loss {numbers['loss']:.4f} on {numbers['rows']:g} rows")
        if self.evaluator is not None:
            self.serve()
            rewards = self.evaluator.evaluate(version, name=name, with_further=with_further)
            self.monitor.log(step, accuracy_metrics(rewards))
        return Measurement(rewards=rewards, loss=numbers, rows=rows)


# The rollouts of evaluations and of the check before training, kept in a journal of their own: none of them trains.
#
# In: groups. Out: `evaluations.db`, created with the first group.


class Transcripts:
    """The journal of rollouts that never train, at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal: Journal | None = None

    def add(self, group: Group) -> None:
        """Add a group. Raises `JournalError` if an earlier one could not be written."""
        if self._journal is None:
            self._journal = Journal(self._path)
        self._journal.add(group)

    def trim(self, until: int) -> None:
        """Drop the text of the evaluations before steps up to `until`, also of earlier sessions. Those before and after
        the training, which are compared, keep theirs. Raises as `add`."""
        if self._journal is None and self._path.exists():
            self._journal = Journal(self._path)
        if self._journal is not None:
            self._journal.trim(until)

    def flush(self) -> None:
        """Wait until all groups so far are on disk. Raises as `add`."""
        if self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        """Write the remaining groups and close the journal."""
        if self._journal is not None:
            self._journal.close()


Progress = Callable[[str, int, int], None]
"""Called with the name of the evaluation, the rollouts done and their total."""
OUT_OF_TIME = frozenset({Outcome.TIMEOUT, Outcome.BLOCKED_LOOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Runs evaluations. `modes` maps each mode to the opener of its sessions; `further` are more task sets, by name.
    `config` sets the reward of a failure and how many rollouts may lack a call or a reward. `keep` receives each group,
    with an id of the form `<when>/<task set>/<mode>/<task id>` (`before/held-out/sampled/train/3`).
    """

    config: RunConfig
    runner: RolloutRunner
    modes: Mapping[Mode, Opener]
    tasks: Sequence[Task]
    further: Mapping[str, Sequence[Task]]
    progress: Progress
    message: Callable[[str], None]
    keep: Callable[[Group], None] | None = None

    def evaluate(self, version: int, *, name: str, with_further: bool) -> Evaluation:
        """Evaluate the weights that are served now, of policy `version`. Raises `RolloutError` if no task could be
        evaluated, `ConfigError` if the workflow gives no reward."""
        held_out = self._evaluate_tasks(_in_set(self.tasks, HELD_OUT), version, name)
        further = {}
        if with_further:
            further = {
                key: self._evaluate_tasks(_in_set(tasks, key), version, f"{name}, {key}")
                for key, tasks in self.further.items()
            }
        return replace(held_out, further=further)

    def _evaluate_tasks(self, tasks: Sequence[Task], version: int, name: str) -> Evaluation:
        rewards: dict[Mode, dict[str, float]] = {"greedy": {}, "sampled": {}}
        metrics: dict[str, dict[str, dict[str, float]]] = {}
        without_calls: dict[str, int] = {}
        out_of_time: dict[str, list[str]] = {}
        no_result: list[str] = []
        for mode, open_session in self.modes.items():
            groups = self._roll_out(open_session, tasks, version, f"{name} ({mode})")
            self._keep_groups(groups, name, mode)
            rewards[mode] = self._rewards(groups, f"{name} ({mode})")
            metrics[mode] = metrics_by_task(groups)
            out_of_time[mode] = tasks_out_of_time(groups)
            found = summarize(groups)
            without_calls[mode] = found.num_without_calls
            no_result += [
                f"{mode}: {reason}" for reason in self._reasons_against(found, len(tasks) - len(rewards[mode]))
            ]
        for reason in no_result:
            self.message(f"evaluating {name}: no result: {reason}")
        return Evaluation(
            greedy=rewards["greedy"],
            sampled=rewards["sampled"],
            metrics={mode: by_name for mode, by_name in metrics.items() if by_name},
            without_calls=without_calls,
            out_of_time={mode: found for mode, found in out_of_time.items() if found},
            no_result="; ".join(no_result),
        )

    def _keep_groups(self, groups: Sequence[Group], name: str, mode: Mode) -> None:
        if self.keep is None:
            return
        when, _, tasks = name.partition(", ")
        for group in groups:
            id_ = f"{when.replace(' ', '-')}/{tasks or HELD_OUT}/{mode}/{group.task.id}"

            def named(rollouts: Iterable[Rollout], group_id: str = id_) -> tuple[Rollout, ...]:
                return tuple(replace(one, id=f"{group_id}/{one.index}", group_id=group_id) for one in rollouts)

            self.keep(replace(group, id=id_, rollouts=named(group.rollouts), attempts=named(group.attempts)))

    def _roll_out(self, open_session: Opener, tasks: Sequence[Task], version: int, name: str) -> list[Group]:
        done = 0

        def count(_: object) -> None:
            nonlocal done
            done += 1
            if done < len(tasks):
                self.progress(name, done, len(tasks))

        self.progress(name, 0, len(tasks))
        # The group ids do not contain the version: the same noise before and after makes the comparison sharper.
        groups = self.runner.run(
            tasks,
            group_ids=[f"eval/{task.id}" for task in tasks],
            version=version,
            group_size=1,
            on_rollout=count,
            open_session=open_session,
            evaluation=True,
        )
        self.progress(name, len(tasks), len(tasks))
        return groups

    def _rewards(self, groups: Sequence[Group], name: str) -> dict[str, float]:
        """Return the reward of each task, and report failures and tasks left out. Raises as `evaluate`."""
        if any(rollout.outcome == Outcome.OK and rollout.reward is None for one in groups for rollout in one.rollouts):
            raise ConfigError(
                "evaluation needs rewards, and the workflow gives none: return WorkflowOutput(reward=...), give a "
                "judge (judge_func, or `judge` in a file), or set evaluation.hold_out: false (and leave eval_dataset "
                "out) to train without evaluating"
            )
        failed = self.config.rollout.failure_reward or 0.0
        rewards, excluded = rewards_by_task(groups, failure_reward=failed)
        for line in failure_lines(groups, failed):
            self.message(f"evaluating {name}: {line}")
        if not rewards:
            raise RolloutError(f"evaluating {name}: no task could be evaluated; the first failure: {excluded[0]}")
        if excluded:
            self.message(
                f"evaluating {name}: {len(excluded)} of {len(groups)} tasks left out; the first: {excluded[0]}"
            )
        return rewards

    def _reasons_against(self, found: RolloutStatistics, left_out: int) -> Iterator[str]:
        """Yield the reasons why an evaluation says nothing about the model."""
        most = self.config.evaluation.max_without_calls
        if found.num_without_calls > most * found.num_rollouts:
            idle = (
                "a cache answers in the model's place, or the workflow does not use the `model` that it receives "
                "(model.client, or base_url=model.base_url with api_key=model.api_key)"
            )
            yield f"{without_calls_note(found, idle)} (evaluation.max_without_calls is {most:g})"
        most = self.config.rollout.max_excluded_share
        if left_out > most * found.num_rollouts:
            yield f"{left_out} of {found.num_rollouts} tasks were left out (rollout.max_excluded_share is {most:g})"


def _in_set(tasks: Sequence[Task], name: str) -> list[Task]:
    """The tasks, each with the name of its evaluation set."""
    return [replace(task, task_set=name) for task in tasks]


def evaluate(
    resolved: ResolvedConfig,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    *,
    endpoint: Mapping[str, str] | None = None,
    output: Path | None = None,
    transcripts: Path | None = None,
) -> Evaluation:
    """Evaluate the configured model, or an endpoint (`base_url`, `model_name`, `api_key`), on `eval_dataset`.

    Without `eval_dataset` it uses the training dataset. An endpoint samples as the agent requests, so it has one mode.
    Prints the accuracies. The file `output` receives the reward of every task as JSON, the folder `transcripts` the
    rollouts (for an endpoint only outcome and reward, since its calls are not recorded). Raises what `tune()` raises,
    and `OSError`, before anything is loaded, if `output` cannot be written.
    """
    config = resolved.config
    if output is not None:
        check_writable(output)
    job = None if endpoint is not None else decide_evaluation(config, workflow, judge)
    if job is None:
        config, notices = decide_endpoint(config)
    else:
        config, notices = job.config, job.notices
    tasks = tasks_of(config.eval_dataset or config.train_dataset, config.environment)[: config.evaluation.max_tasks]
    further = {name: tasks_of(dataset, config.environment) for name, dataset in config.evaluation.further.items()}
    display = Display(0, sys.stdout)
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        for line in notices:
            display.message(line)
        runner: RolloutRunner
        modes: Mapping[Mode, Opener]
        if job is not None:
            display.doing(f"loading the model {config.model.model_path}")
            serving = start_serving(job)
            stack.callback(serving.close)
            display.doing("")
            display.message(serving.line)
            runner, modes = serving.runner, serving.modes
        else:
            assert endpoint is not None
            runner, modes = _endpoint_runner(config, workflow, judge, endpoint, stack)
        evaluator = Evaluator(
            config=config,
            runner=runner,
            modes=modes,
            tasks=tasks,
            further=further,
            progress=display.evaluation,
            message=display.message,
            keep=None if transcripts is None else stack.enter_context(_open_transcripts(transcripts, resolved)).add,
        )
        found = evaluator.evaluate(0, name="model", with_further=True)
        for line in evaluation_lines(found):
            display.message(line)
    if output is not None:
        write_whole(output, f"{json.dumps(evaluation_to_json(found), indent=2)}\n")
    return found


def _endpoint_runner(
    config: RunConfig,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    endpoint: Mapping[str, str],
    stack: contextlib.ExitStack,
) -> tuple[RolloutRunner, Mapping[Mode, Opener]]:
    """Return a runner whose policy is an endpoint, and its modes; `stack` closes them."""
    functions = UserFunctions(
        workflow,
        judge,
        config.workflow_args,
        own_arguments=own_arguments(config.evaluation),
        model_exceptions=config.rollout.model_exceptions,
    )
    stack.enter_context(silent_agents())
    thread = ServingThread()
    stack.callback(thread.close)
    auxiliary = AuxiliaryModels(
        config.auxiliary_models,
        thread,
        loading(config.engine, deterministic=config.deterministic),
        listen=config.gateway,
    )
    stack.callback(auxiliary.close)
    policy = RemoteModel(
        name="policy",
        model_name=endpoint["model_name"],
        base_url=endpoint["base_url"],
        api_key=endpoint["api_key"],
        listen=config.gateway.model_copy(update={"port": 0}),
    )
    stack.callback(policy.close)
    open_sampled = opener(policy.open, auxiliary)
    attempts = attempt_runner(functions, config.rollout)
    whole_groups = functions.whole_groups
    runner = RolloutRunner(attempts, open_sampled, config.rollout, 1, config.seed, whole_groups=whole_groups)
    stack.callback(runner.close)
    return runner, {"sampled": open_sampled}


def _open_transcripts(folder: Path, resolved: ResolvedConfig) -> Journal:
    """Open a journal in the folder. Write the settings next to it (they name the tokenizer) unless it has some."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "resolved.json").exists():
        write_resolved(folder / "resolved.json", resolved)
    return Journal(folder / EVALUATIONS)


def evaluation_lines(found: Evaluation, name: str = "held-out") -> list[str]:
    """Return one line for each mode with the mean reward, its 95% interval and the number of tasks, followed by one
    line for each metric of workflow and judge."""
    return _lines_of(found, name, found)


def _lines_of(found: Evaluation, name: str, whole: Evaluation) -> list[str]:
    """Return the lines of one dataset of the whole evaluation, which says what kind of numbers they are."""
    lines = []
    for mode, rewards in found.rewards.items():
        if rewards:
            mean = accuracy(rewards.values(), among=distinct_rewards(whole))
            lines.append(f"{name} {mode}: {with_interval(mean)} ({mean.num_tasks} tasks)")
            for metric, values in found.metrics.get(mode, {}).items():
                measured = accuracy(values.values(), among=distinct_values(metric, whole))
                lines.append(f"  {metric}: {with_interval(measured)} ({len(values)} tasks)")
    for other, inner in found.further.items():
        lines += _lines_of(inner, other, whole)
    return lines


def rewards_by_task(groups: Sequence[Group], *, failure_reward: float = 0.0) -> tuple[dict[str, float], list[str]]:
    """Return the mean reward of each task, and one line for each rollout left out because neither the model nor the
    agent made it fail."""
    rewards: dict[str, float] = {}
    excluded: list[str] = []
    for group in groups:
        values = []
        for rollout in group.rollouts:
            if rollout.reward is not None:
                values.append(rollout.reward)
            elif fails_its_task(rollout):
                values.append(failure_reward)
            else:
                excluded.append(f"{rollout.task_id}: {rollout.outcome.value}: {rollout.error}")
        if values:
            rewards[group.task.id] = sum(values) / len(values)
    return rewards, excluded


def tasks_out_of_time(groups: Sequence[Group]) -> list[str]:
    """Return the tasks that count as failed because a time limit ended a rollout of theirs."""
    return [
        group.task.id
        for group in groups
        if any(one.outcome in OUT_OF_TIME and fails_its_task(one) for one in group.rollouts)
    ]


def metrics_by_task(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Return the metrics of workflow and judge: for each name, the mean of each task that has it."""
    found: dict[str, dict[str, list[float]]] = {}
    for group in groups:
        for rollout in group.rollouts:
            for name, value in own_metrics(rollout.metrics).items():
                found.setdefault(name, {}).setdefault(group.task.id, []).append(value)
    return {name: {task: fmean(values) for task, values in found[name].items()} for name in sorted(found)}


def failure_lines(groups: Sequence[Group], failure_reward: float) -> list[str]:
    """Return a line for each cause of failures that count, and of failed attempts that were repeated."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    again = [rollout for group in groups for rollout in group.attempts]
    lines = [
        f"{count} of {len(rollouts)} rollouts failed ({cause}) and count {failure_reward:g}; the first: {first}"
        for cause, count, first in _causes(rollout for rollout in rollouts if fails_its_task(rollout))
    ]
    return lines + [
        f"{count} failed attempts ({cause}) were repeated; the first: {first}" for cause, count, first in _causes(again)
    ]


def _causes(failed: Iterable[Rollout]) -> list[tuple[str, int, str]]:
    """Return (cause, number of failures, first error) for each cause."""
    by_cause: dict[Outcome, list[Rollout]] = {}
    for rollout in failed:
        by_cause.setdefault(rollout.outcome, []).append(rollout)
    return [
        (cause.value, len(found), f"{found[0].task_id}: {found[0].error or 'no message'}")
        for cause, found in by_cause.items()
    ]
