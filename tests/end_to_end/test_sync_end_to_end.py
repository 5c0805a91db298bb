"""Rollouts that run ahead of the training, through the whole line: each style, the certificate, a kill in between."""

import asyncio
import json
import random
import shutil
import sqlite3
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
from killed_runs import run_killed

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.load import resolve
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_groups_at, read_last_groups, read_steps, read_trained
from sharpen.learning.recipe import check_settings, recipe_of
from sharpen.learning.trainer.checkpoint import load, pointed

BATCH_SIZE, GROUP_SIZE, STEPS = 2, 4, 6


async def letters(task, model):
    """Two calls, the second after the first one's answer; the reward is the share of letters up to 'm', of which a
    random model says some in nearly every answer, so that small batches have something to learn from."""
    messages = [{"role": "user", "content": task["question"]}]
    text = ""
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
        said = reply.choices[0].message.content or ""
        text += said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return WorkflowOutput(reward=sum("a" <= letter <= "m" for letter in text) / 12)


async def pauses(task, model):
    """As `letters`, with a tool that takes its time."""
    await asyncio.sleep(random.random() * 0.05)
    return await letters(task, model)


def run(
    folder: Path, model: Path, dataset: Path, sync: dict, *, steps=STEPS, workflow=letters, settings=None, **algorithm
):
    return tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=str(dataset), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=256, max_tokens=8),
        algorithm=AlgorithmConfig(
            **{
                "algorithm_type": "grpo",
                "group_size": GROUP_SIZE,
                "batch_size": BATCH_SIZE,
                "learning_rate": 1e-2,
                "save_interval_steps": 3,
                "eval_interval_steps": 99,
                **algorithm,
            }
        ),
        project_name="P",
        experiment_name="fixed",
        settings={
            "checkpoint_root_dir": str(folder),
            "evaluation.before_and_after": False,
            "evaluation.max_tasks": 2,
            "check.enabled": False,
            "certificate.retrain": "off",  # these tests certify what is recorded
            "rollout.failure_reward": 0.0,
            "engine.max_slots": 12,
            **{f"sync.{name}": value for name, value in sync.items()},
            **(settings or {}),
        },
    )


def rows(run_dir: Path) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return list({row["step"]: row for row in lines if "rollout/count" in row}.values())


def check_accounted(run_dir: Path, steps: int = STEPS, *, batch_size: int = BATCH_SIZE, replays: bool = False) -> None:
    """Every (task, rollout) of every batch trained in its step, once, whole; the records say so."""
    journal = run_dir / "run.db"
    last = read_last_groups(journal)
    assert list(last) == list(range(1, steps + 1))
    tasks: Counter[str] = Counter()
    for step, keys in last.items():
        groups = read_groups_at(journal, keys)
        assert len(groups) == batch_size
        assert all(len(group.rollouts) == GROUP_SIZE for group in groups)
        tasks.update(group.task.id for group in groups)
        trained = {call.group_id for call in read_trained(journal, step=step)}
        assert replays or trained <= {group.id for group in groups}
    assert set(tasks.values()) == {1}  # fewer than an epoch: no task comes twice
    assert len(tasks) == steps * batch_size


def ages_by_step(run_dir: Path) -> list[set[int]]:
    """How many versions behind the tokens of each step were, by the records."""
    version, found = 0, []
    steps = {record.step: record.version for record in read_steps(run_dir / "run.db")}
    for step, keys in read_last_groups(run_dir / "run.db").items():
        groups = read_groups_at(run_dir / "run.db", keys)
        calls = [call for group in groups for rollout in group.scored for call in rollout.calls]
        found.append({version - int(v) for call in calls for v in call.versions_S})
        version = steps[step]
    return found


@pytest.mark.parametrize(
    ("sync", "options", "ages", "compared"),
    [
        ({"offset": 1}, {}, [0, 1, 1, 1, 1, 1], [True, True, True, True, True, False]),
        ({"interval": 2}, {}, [0, 1, 0, 1, 0, 1], [True, False, True, False, True, False]),
        (
            {"interval": 2, "offset": 1},
            {"eval_interval_steps": 4, "settings": {"trainer.num_minibatches": 2}},
            [0, 2, 4, 2, 4, 2],
            None,
        ),
    ],
)
def test_fixed_is_as_far_behind_as_the_schedule_says_and_compared_after_every_sync(
    tmp_path, toy_model_dir, toy_dataset, capsys, sync, options, ages, compared
):
    """The ages are those of the schedule; an evaluation after step 4 only makes the batches behind it younger.
    Offline, a smaller bound is seen to be broken. Red when `certify` takes the groups' version for the trainer's.

    Where a step trains on older tokens alone, a probe of the engine is compared; the last step follows no sync that
    anything is rolled out after. Red when `train` (rollouts.py) passes no probe, or `_sync` (explorer.py) asks for
    none.
    """
    options = {**options, "settings": {**options.get("settings", {}), "deterministic": True}}
    result = run(tmp_path, toy_model_dir, toy_dataset, sync, **options)
    found = ages_by_step(result.run_dir)
    assert found[:4] == [{age} for age in ages[:4]]
    assert all(max(one) <= age for one, age in zip(found, ages, strict=True))
    check_accounted(result.run_dir)
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    with sqlite3.connect(result.run_dir / "run.db") as connection:
        connection.execute("UPDATE steps SET metrics = json_set(metrics, '$.\"sync/staleness_allowed\"', 0)")
    connection.close()
    problems = certify(result.run_dir, logprobs=False).problems
    assert any("staleness: no token is older than allowed" in problem for problem in problems)
    shown = rows(result.run_dir)
    assert [row["sync/staleness_max"] for row in shown] == [max(one) for one in found]
    assert "rollouts run ahead of the training (sync.style fixed" in (out := capsys.readouterr().out)
    assert "time of all steps: generating" in out
    if compared:
        assert found == [{age} for age in ages]
        assert [row.get("trainer/logprob_gap_tokens", 0) > 0 for row in shown] == compared
    probed = [row for row in shown if row["sync/staleness_max"] > 0]
    assert max(row.get("trainer/logprob_gap_tokens", 0) for row in probed) <= 16
    assert all(row.get("trainer/logprob_gap_max", 0) <= 1e-4 for row in shown)


@pytest.mark.parametrize(
    "sync",
    [
        {"style": "dynamic_by_explorer"},
        {"style": "dynamic_by_trainer", "interval": 2},
        {"style": "fully_async"},
        {"style": "fully_async", "max_staleness": 3},
    ],
)
def test_other_styles_stay_within_their_bound(tmp_path, toy_model_dir, toy_dataset, sync):
    """Red when `_may_begin` (sync/schedule.py) does not look at the age."""
    result = run(tmp_path, toy_model_dir, toy_dataset, sync, workflow=pauses, steps=5)
    bound = sync.get("max_staleness", 2 * sync.get("interval", 1) - 1)
    found = ages_by_step(result.run_dir)
    assert 0 < max(max(one) for one in found) <= bound
    check_accounted(result.run_dir, 5)
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    assert {check.name: check.broken for check in certificate.checks}["staleness"] == 0


def test_rollouts_in_flight_go_on_under_new_weights_with_a_version_for_each_token(tmp_path, toy_model_dir, toy_dataset):
    """`fully_async`: the pause between the two calls of a rollout lasts until the batches before its own have trained.
    The other styles let rollouts end first. Red when `fully_async` drains, or others do not (`drains`,
    sync/schedule.py).
    """
    mixed = {}
    for style in ("fully_async", "dynamic_by_explorer"):
        metrics = tmp_path / style / "P" / "fixed" / "metrics.jsonl"
        begun = count()

        async def waits_for_its_turn(task, model, metrics=metrics, begun=begun):
            turn = next(begun) // (BATCH_SIZE * GROUP_SIZE)
            messages = [{"role": "user", "content": task["question"]}]
            await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
            while turn and not (metrics.exists() and metrics.read_text().count("rollout/count") >= turn):
                await asyncio.sleep(0.02)
            return await letters(task, model)

        sync = {"style": style, "max_staleness": 2}
        slow = waits_for_its_turn
        result = run(tmp_path / style, toy_model_dir, toy_dataset, sync, workflow=slow, steps=4)
        rollouts = [rollout for group in read_groups(result.run_dir / "run.db") for rollout in group.scored]
        mixed[style] = sum(len({int(v) for call in one.calls for v in call.versions_S}) > 1 for one in rollouts)
        certificate = certify(result.run_dir)
        assert certificate.holds, certificate.problems
        assert certificate.staleness is not None
        assert certificate.staleness[0] <= 2
    assert mixed["fully_async"] > 0
    assert mixed["dynamic_by_explorer"] == 0


def test_trap_25_two_deterministic_runs_are_bitwise_equal_one_step_off(tmp_path, toy_model_dir, toy_dataset):
    """Red when `fixed` syncs before what is in flight has ended: the clock would decide on versions. In the second run
    some rollouts begin only when the step before theirs has long trained."""

    async def late(task, model):
        await asyncio.sleep(random.choice((0.0, 0.5)))
        return await letters(task, model)

    weights = []
    for number, workflow in enumerate((letters, late)):
        folder, settings = tmp_path / str(number), {"deterministic": True}
        result = run(folder, toy_model_dir, toy_dataset, {"offset": 1}, workflow=workflow, settings=settings, steps=4)
        weights.append((result.model_dir / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def tasks_by_step(run_dir: Path) -> dict[int, list[str]]:
    journal = run_dir / "run.db"
    return {
        step: [one.task.id for one in read_groups_at(journal, keys)] for step, keys in read_last_groups(journal).items()
    }


@pytest.mark.parametrize("sync", [{"interval": 2, "offset": 1}, {"style": "fully_async", "max_staleness": 2}])
def test_trap_13_and_24_a_killed_run_rolls_out_again_what_was_in_flight(tmp_path, toy_model_dir, toy_dataset, sync):
    """The checkpoint is of step 3 (or 4), with batches behind it begun. Nothing trains twice, nothing is skipped, and
    no token is too old. Red when `run.assembly` passes no `drawn`: their tasks would be skipped; or when the
    explorer forgets to serve the restored weights' version.
    """
    options: dict = {"sync": sync, "steps": 7}
    run_dir = run_killed(run, letters, tmp_path, toy_model_dir, toy_dataset, recorded=4, **options)
    position = load(pointed(run_dir, "latest")).state["position"]
    assert position["step"] in (3, 4)
    assert position["drawn"], "batches were in flight"
    run(tmp_path, toy_model_dir, toy_dataset, **options)
    check_accounted(run_dir, 7)
    assert max(max(ages) for ages in ages_by_step(run_dir)) <= 2
    certificate = certify(run_dir)
    assert certificate.holds, certificate.problems
    whole = run(tmp_path / "whole", toy_model_dir, toy_dataset, **options)
    assert tasks_by_step(run_dir) == tasks_by_step(whole.run_dir)


def test_a_run_that_its_time_limit_ends_gives_up_what_is_in_flight_and_goes_on_from_there(
    tmp_path, toy_model_dir, toy_dataset
):
    """Red when `run` (loop.py) does not close the explorer before it evaluates: that would wait for both batches."""
    begun = late = 0
    dataset = tmp_path / "dataset"
    shutil.copytree(toy_dataset, dataset)
    (dataset / "test.jsonl").write_text("".join(f'{{"question": "held out {i}"}}\n' for i in range(10)))
    toy_dataset = dataset

    async def slow_from_the_second_batch(task, model):
        nonlocal begun, late
        trains = not task["question"].startswith("held out")
        begun += trains
        if trains and begun > BATCH_SIZE * GROUP_SIZE:
            await asyncio.sleep(100.0)
            late += 1
        return await letters(task, model)

    settings: dict = {"evaluation.before_and_after": True}
    assert run(tmp_path, toy_model_dir, toy_dataset, {"offset": 2}, steps=1, settings=settings).steps == 1
    settings |= {"time_limit_s": 0.01}
    slow = slow_from_the_second_batch
    second = run(tmp_path, toy_model_dir, toy_dataset, {"offset": 2}, workflow=slow, settings=settings)
    assert second.steps == 2
    assert late == 0
    third = run(tmp_path, toy_model_dir, toy_dataset, {"offset": 2}, steps=4)
    assert third.steps == 4
    check_accounted(third.run_dir, 4)


@pytest.mark.parametrize(("sync", "bound"), [({"offset": 1}, 5), ({"style": "fully_async", "max_staleness": 2}, 6)])
def test_replay_takes_part_within_its_own_bound(tmp_path, toy_model_dir, toy_dataset, sync, bound):
    """Replayed groups train together with fresh ones, also after a resume. Both keep their own bound, and `certify`
    draws the same groups. Red when `_async_metrics` (rollouts.py) counts replayed tokens as fresh."""
    settings = {"sampling.replay_share": 1.0}  # two groups in each step but the first
    run(tmp_path, toy_model_dir, toy_dataset, sync, steps=4, workflow=pauses, settings=settings)
    result = run(tmp_path, toy_model_dir, toy_dataset, sync, steps=6, workflow=pauses, settings=settings)
    shown = rows(result.run_dir)
    assert sum(row["batch/groups_replayed"] for row in shown) >= 7
    assert 1 < max(row["batch/replay_age_max"] for row in shown) <= bound
    assert max(row["sync/staleness_max"] for row in shown) <= shown[0]["sync/staleness_allowed"] <= 2
    assert shown[1]["trainer/logprob_gap_tokens"] >= 16, "the probe of the sync behind step 1"
    check_accounted(result.run_dir, 6, replays=True)
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems


def test_refill_takes_part(tmp_path, toy_model_dir, toy_dataset):
    """Further tasks for groups without spread, rolled out when their step is next; all of it within the bound."""

    async def holds_letter(task, model):
        reply = await model.client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
        )
        return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))

    settings = {"sampling.max_refill": 4.0, "trainer.num_minibatches": 2}
    options = {"algorithm_type": "dapo", "learning_rate": 1e-3}
    result = run(
        tmp_path,
        toy_model_dir,
        toy_dataset,
        {"offset": 1},
        steps=3,
        workflow=holds_letter,
        settings=settings,
        **options,
    )
    assert sum(row["refill/tasks"] for row in rows(result.run_dir)) > 0
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    assert max(max(ages) for ages in ages_by_step(result.run_dir)) <= 2


@pytest.mark.parametrize(
    ("sync", "settings", "part"),
    [
        ({"offset": 1}, {"loss.policy_loss": "reinforce"}, "'reinforce' of 'grpo' has no probability ratio"),
        ({"style": "fully_async"}, {"deterministic": True}, "depend on timing"),
        ({"max_staleness": 1}, {}, "so that it has no effect"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(tmp_path, toy_dataset, sync, settings, part):
    with pytest.raises(ConfigError, match=part):
        run(tmp_path, tmp_path / "no model", toy_dataset, sync, settings=settings)


def test_a_teacher_may_judge_states_that_an_older_policy_came_to():
    config = resolve(
        settings={
            "train_dataset.path": "tasks.jsonl",
            "model": {"model_path": "a model", "max_model_len": 64},
            "algorithm.algorithm_type": "jsd",
            "sync.offset": 1,
        }
    ).config
    check_settings(recipe_of(config))
