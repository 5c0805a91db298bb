"""Sampling and shaping through the whole line: refill, filters, over-long shaping, orders, and a kill in between."""

import itertools
import json
import re
from pathlib import Path

import pytest
from killed_runs import run_killed

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.agent.tasks.order import TaskOrder
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_group_ids, read_groups, read_groups_at, read_steps
from sharpen.learning.trainer.checkpoint import load, pointed
from sharpen.types import step_of_group

BATCH_SIZE = 4
NUM_TASKS = 40
REFILL_ALL = {"sampling.max_refill": 20.0}


async def holds_letter(task, model, max_tokens=4):
    """One call of at most 4 tokens; reward 1 if the answer holds an 'e', else 0: many groups are flat at first."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=max_tokens
    )
    text = reply.choices[0].message.content or ""
    return WorkflowOutput(reward=float("e" in text))


def run(folder, model, dataset, *, steps: int, algorithm="dapo", save_interval_steps=3, settings=None, workflow=None):
    return tune(
        workflow_func=workflow or holds_letter,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=str(dataset), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm,
            group_size=3,
            batch_size=BATCH_SIZE,
            learning_rate=1e-3,
            save_interval_steps=save_interval_steps,
        ),
        project_name="P",
        experiment_name="fixed",
        settings={
            "checkpoint_root_dir": str(folder),
            "evaluation.before_and_after": False,
            "check.enabled": False,
            "rollout.failure_reward": 0.0,
            "certificate.retrain": "off",
            **(settings or {}),
        },
    )


def last_groups(run_dir: Path) -> dict[int, list[str]]:
    """The ids of each step's groups as they were last rolled out, in order."""
    found: dict[int, list[str]] = {}
    for step, ids in itertools.groupby((id_ for _, id_ in read_group_ids(run_dir / "run.db")), step_of_group):
        ids = list(ids)
        start = max(i for i, id_ in enumerate(ids) if id_ == ids[0])
        found[step] = ids[start:]
    return found


def check_order(steps: dict[int, list[str]]) -> list[int]:
    """Every step drew exactly what an uninterrupted order gives; the tasks in the order they were drawn."""
    order, drawn = TaskOrder(NUM_TASKS, 0, BATCH_SIZE), []
    for step in sorted(steps):
        rounds = [list(ids) for _, ids in itertools.groupby(steps[step], lambda id_: "/".join(id_.split("/")[:-2]))]
        assert len(rounds[0]) == BATCH_SIZE
        for ids in rounds:
            places = [int(id_.split("/")[-1]) for id_ in ids]
            assert places == order.draw(len(ids)), f"step {step}"
            drawn += places
    return drawn


def rows(run_dir: Path) -> list[dict]:
    return [
        row
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        if "rollout/count" in (row := json.loads(line))
    ]


def test_flat_groups_are_replaced_until_the_batch_is_full_and_the_certificate_holds(
    tmp_path, toy_model_dir, toy_dataset, capsys
):
    """Red when `gather` (explorer.py) does not refill, or `draw` goes on from another position."""
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=3, settings=REFILL_ALL)
    steps = last_groups(result.run_dir)
    drawn = check_order(steps)
    assert len(drawn) > 3 * BATCH_SIZE
    for row in rows(result.run_dir):
        assert row["refill/usable_groups"] == row["batch/groups"] == BATCH_SIZE
        assert row["refill/tasks"] == len(steps[row["step"]]) - BATCH_SIZE == row["batch/groups_dropped_flat"]
        assert row["rollout/count"] == 3 * len(steps[row["step"]])
    versions = {group.id: group.version for group in read_groups(result.run_dir / "run.db")}
    assert all(len({versions[id_] for id_ in ids}) == 1 for ids in steps.values())
    found = certify(result.run_dir)
    assert found.holds, found.problems
    checks = {check.name: check for check in found.checks}
    assert checks["groups"].checked == len(drawn)
    assert checks["accounted"].checked == 3 * len(drawn)
    written = json.loads((result.run_dir / "certificate.json").read_text())
    assert written["holds"]
    assert {check["name"]: check["checked"] for check in written["checks"]} == {
        check.name: check.checked for check in found.checks
    }
    assert re.search(r"step \d: .*refilled with \d+ further tasks? in \d+ rounds? \(", capsys.readouterr().out)


def test_the_bound_holds_and_grpo_does_not_refill(tmp_path, toy_model_dir, toy_dataset, capsys):
    async def never(task, model):
        await holds_letter(task, model)
        return WorkflowOutput(reward=0.0)

    result = run(tmp_path, toy_model_dir, toy_dataset, steps=1, workflow=never, settings={"sampling.max_refill": 1.5})
    (row,) = rows(result.run_dir)
    assert (row["refill/tasks"], row["refill/usable_groups"]) == (6, 0)
    assert "refilled with 6 further tasks" in (shown := capsys.readouterr().out)
    assert "0 of 4 groups train" in shown
    assert certify(result.run_dir).holds
    plain = run(tmp_path / "grpo", toy_model_dir, toy_dataset, steps=1, algorithm="grpo", workflow=never)
    assert [len(ids) for ids in last_groups(plain.run_dir).values()] == [BATCH_SIZE]


def test_shaped_rewards_and_filters_are_certified_from_the_records(tmp_path, toy_model_dir, toy_dataset):
    """Red when `certify` does not read the `sampling` section, or a recorded reward is replaced by a shaped one."""
    lengths = itertools.cycle((1, 2, 4, 3, 4))

    async def of_any_length(task, model):
        return await holds_letter(task, model, next(lengths))

    settings = {
        "sampling.overlong_cache": 3,
        "sampling.overlong_length": 4,
        "sampling.overlong_penalty": 0.5,
        "sampling.reward_high": 0.9,
        "trainer.num_minibatches": 2,
    }
    result = run(
        tmp_path, toy_model_dir, toy_dataset, steps=2, algorithm="dr_grpo", settings=settings, workflow=of_any_length
    )
    found = certify(result.run_dir)
    assert found.holds, found.problems
    rewards = [rollout.reward for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts]
    assert set(rewards) <= {0.0, 1.0}
    for row in rows(result.run_dir):
        assert row["batch/reward_shaped_mean"] < row["batch/reward_mean"]
    resolved = json.loads((result.run_dir / "resolved.json").read_text())
    resolved["sampling.overlong_penalty"]["value"] = 0.25
    (result.run_dir / "resolved.json").write_text(json.dumps(resolved))
    assert any("was trained on" in problem for problem in certify(result.run_dir, logprobs=False).problems)


def test_the_difficulty_orders_state_is_in_the_checkpoint_and_resumed(tmp_path, toy_model_dir, toy_dataset):
    settings = {"sampling.order": "difficulty"}
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=2, settings=settings)
    before = load(pointed(result.run_dir, "latest")).state["position"]["order"]
    groups = list(read_groups(result.run_dir / "run.db"))
    assert {task for task, _ in before["means"]} == {int(group.task.id.split("/")[1]) for group in groups}
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=3, settings=settings)
    after = load(pointed(result.run_dir, "latest")).state["position"]["order"]
    assert after["num_draws"] > before["num_draws"]
    assert {task for task, _ in before["means"]} <= {task for task, _ in after["means"]}
    assert certify(result.run_dir, logprobs=False).holds


def test_a_killed_run_goes_on_with_exactly_the_tasks_it_would_have_drawn(tmp_path, toy_model_dir, toy_dataset):
    """Killed in step 4, with the last checkpoint after step 2: steps 3 and 4 are done again.

    Red when `state` (order.py) leaves the position out of the checkpoint, or `_last_groups` (certify.py) takes the
    groups of both attempts.
    """
    options = {"steps": 5, "save_interval_steps": 2, "settings": REFILL_ALL}
    run_dir = run_killed(run, holds_letter, tmp_path, toy_model_dir, toy_dataset, recorded=3, **options)
    assert load(pointed(run_dir, "latest")).state["position"]["step"] == 2
    assert [record.step for record in read_steps(run_dir / "run.db")] == [1, 2, 3]
    run(tmp_path, toy_model_dir, toy_dataset, **options)
    steps = last_groups(run_dir)
    assert sorted(steps) == [1, 2, 3, 4, 5]
    drawn = check_order(steps)
    assert load(pointed(run_dir, "latest")).state["position"]["order"]["position"] == len(drawn) % NUM_TASKS
    for epoch in range(len(drawn) // NUM_TASKS):
        assert sorted(drawn[epoch * NUM_TASKS : (epoch + 1) * NUM_TASKS]) == list(range(NUM_TASKS))
    found = certify(run_dir)
    assert found.holds, found.problems
    assert {check.name: check.checked for check in found.checks}["groups"] == len(drawn)


def test_a_batch_larger_than_the_dataset_holds_tasks_twice_each_in_a_group_of_its_own(tmp_path, toy_model_dir):
    """Red when the groups' ids (`distinct`, order.py) are the same: their rollouts would be taken for one another's."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(f'{{"question": "q {i}"}}\n' for i in range(3)))
    result = run(tmp_path, toy_model_dir, tmp_path, steps=2, algorithm="grpo")
    for ids in last_groups(result.run_dir).values():
        assert len(set(ids)) == BATCH_SIZE
        assert sum(id_.endswith("#2") for id_ in ids) == 1
    assert certify(result.run_dir).holds


def test_groups_are_read_at_their_places(tmp_path, toy_model_dir, toy_dataset):
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=1)
    journal = result.run_dir / "run.db"
    keys = [key for key, _ in read_group_ids(journal)]
    assert [group.id for group in read_groups_at(journal, keys[::-1])] == [id_ for _, id_ in read_group_ids(journal)][
        ::-1
    ]


@pytest.mark.parametrize("name", ["sampling.max_refil", "sampling.ordr"])
def test_a_misspelt_setting_is_refused_with_the_nearest(tmp_path, toy_model_dir, toy_dataset, name):
    from sharpen.errors import ConfigError

    with pytest.raises(ConfigError, match="did you mean"):
        run(tmp_path, toy_model_dir, toy_dataset, steps=1, settings={name: 1})
