"""Experiences of another task (`exp.eid.task`) are a group beside the task's own: a policy that judges itself."""

from __future__ import annotations

import shutil
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trinity_serving import MakePlace

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.cli.main import main
from sharpen.compat.trinity import Workflow
from sharpen.compat.trinity.workflows.ruler import TRUTH_IS_KNOWN, _share
from sharpen.errors import ConfigError
from sharpen.learning.experience.merge import merge
from sharpen.learning.experience.reading import read_groups, read_steps
from sharpen.types import CallStatus, Group, Outcome

GSM8K = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
KEYS = {"prompt_key": "question", "response_key": "answer"}
KNOWN = [number for number in range(60) if _share(f"g{number}") < TRUTH_IS_KNOWN]
"""The groups in which the judgements are compared with the truth."""


def answers_and_judgements(*judgements: str) -> Any:
    """Says 40, 41, 42 and so on to the question, and the lines to whoever asks for scores."""
    said, lines = iter(range(40, 10_000)), iter(judgements)
    return lambda prompt: next(lines) if "Solution 1" in prompt else f"<think>.</think><answer>{next(said)}</answer>"


def run_group(make_place: MakePlace, script: Any, number: int, **options: Any) -> tuple[Group, Any]:
    """One group of four, with the id g<number>."""
    place = make_place(script)
    from sharpen.agent.rollout.attempt import UserFunctions
    from sharpen.agent.rollout.in_process import InProcess
    from sharpen.agent.rollout.runner import RolloutRunner
    from sharpen.compat.trinity import workflow_function
    from sharpen.compat.trinity.task import TasksetConfig
    from sharpen.config.run import RolloutConfig
    from sharpen.types import Task

    functions = UserFunctions(workflow_function("math_trainable_ruler_workflow", TasksetConfig(**KEYS), {}), None, {})
    config = RolloutConfig(timeout_s=20.0, max_attempts=1)
    with RolloutRunner(InProcess(functions, 20.0), place.open, config, 4, 0, whole_groups=True) as runner:
        task = Task(id="train/0", index=0, row=GSM8K)
        (group,) = runner.run([task], group_ids=[f"g{number}"], **options)
    return group, place


def test_a_fifth_of_the_groups_know_the_truth():
    shares = [_share(f"step-{step}/train/{task}") for step in range(40) for task in range(50)]
    assert np.mean([share < TRUTH_IS_KNOWN for share in shares]) == pytest.approx(0.2, abs=0.03)
    assert shares == [_share(f"step-{step}/train/{task}") for step in range(40) for task in range(50)]


def test_judgements_are_a_group_of_their_own_where_the_truth_is_known(make_place: MakePlace):
    """Red where `results_of` does not look at `eid.task`: then eight experiences are said to be of four runs."""
    script = answers_and_judgements("[0, 0, 1, 0]", "[1, 1, 1, 1]", "I cannot say", "so: [0, 0, 1, 0]")
    group, place = run_group(make_place, script, KNOWN[0])
    texts = [str(rollout.calls[0].response["content"]) for rollout in group.rollouts]
    gold = [1.1 if "<answer>42<" in text else 0.1 for text in texts]
    assert [rollout.reward for rollout in group.rollouts] == pytest.approx(gold)
    assert sorted(gold) == [0.1, 0.1, 0.1, 1.1]
    (side,) = group.side
    assert (side.id, side.beside) == (f"{group.id}~ruler", group.id)
    assert [rollout.id for rollout in side.rollouts] == [f"{side.id}/{number}" for number in range(4)]
    wanted = [(reward + 0.1) / 1.2 for reward in gold]
    for rollout in side.rollouts:
        (call,) = rollout.calls
        assert (call.index, call.parent, call.status) == (0, None, CallStatus.USED)
        assert (rollout.outcome, rollout.task_id) == (Outcome.OK, "train/0")
        said = {"I cannot say": None, "[1, 1, 1, 1]": [1, 1, 1, 1]}.get(str(call.response["content"]), [0, 0, 1, 0])
        reward = 0.0 if said is None else 1 - np.mean(np.abs(np.array(said) - wanted))
        assert rollout.reward == pytest.approx(reward)
        assert dict(rollout.call_rewards) == {0: rollout.reward}
        assert rollout.metrics["reward_for_judge"] == rollout.reward
        (experience,) = merge(rollout)
        assert experience.ids_T[experience.loss_mask_T].tolist() == call.sampled_ids_S.tolist()
    assert [rollout.metrics["judge_success"] for rollout in group.rollouts] == [0.75] * 4
    assert [len(rollout.calls) for rollout in group.rollouts] == [1] * 4
    assert len(place.engine.prompts) == 8


def test_one_judgement_rewards_the_answers_where_it_is_not(make_place: MakePlace):
    number = next(number for number in range(60) if number not in KNOWN)
    group, place = run_group(make_place, answers_and_judgements("[0.25, 1, 0, 0.5]"), number)
    assert [rollout.reward for rollout in group.rollouts] == [0.25, 1.0, 0.0, 0.5]
    assert (group.side, len(place.engine.prompts)) == ((), 5)
    judged = [call for rollout in group.rollouts for call in rollout.calls if call.status == CallStatus.LEFT_OUT]
    assert [call.response["content"] for call in judged] == ["[0.25, 1, 0, 0.5]"]


def test_a_judgement_of_its_own_that_cannot_be_read_is_no_failure_of_the_run(make_place: MakePlace):
    number = next(number for number in range(60) if number not in KNOWN)
    group, _ = run_group(make_place, answers_and_judgements("no idea"), number)
    assert [(one.outcome, one.reward, one.metrics["judge_success"]) for one in group.rollouts] == [
        (Outcome.OK, 0.0, 0.0)
    ] * 4


def test_an_evaluation_asks_the_reward_function_alone(make_place: MakePlace):
    place = make_place(answers_and_judgements())
    rollout = place.one("math_trainable_ruler_workflow", GSM8K, taskset=KEYS, record=False)
    assert (rollout.reward, len(place.engine.prompts)) == (0.1, 1)


class Alone(Workflow):
    """One answer to the task, and to another one; run once for each rollout."""

    def run(self):
        self.model.chat([{"role": "user", "content": "1"}])
        self.model.chat([{"role": "user", "content": "2"}])
        first, second = self.model.extract_experience_from_history()
        first.reward, second.reward = 1.0, float(self.task.index["rollout"])
        how = self.task.workflow_args.get("how")
        if how != "some" or self.task.index["rollout"] != 1:
            second.eid.task = "other"
        if how == "both":
            again = self.model.convert_messages_to_experience(first.messages)
            again.reward, again.eid.task = 1.0, "other"
            return [first, second, again]
        return [first] if how == "some" and self.task.index["rollout"] == 1 else [first, second]


def test_rollouts_that_run_alone_have_a_group_beside_them_too(make_place: MakePlace):
    (group,) = make_place("yes").run(Alone, {"prompt": "q"}, group_size=3)
    (side,) = group.side
    assert (side.id, [rollout.reward for rollout in side.rollouts]) == ("g0~other", [0.0, 1.0, 2.0])
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    for rollout in (*group.rollouts, *side.rollouts):
        assert [(call.index, call.status) for call in rollout.calls] == [(0, CallStatus.USED)]


def test_some_rollouts_may_have_nothing_beside_them(make_place: MakePlace):
    (group,) = make_place("yes").run(Alone, {"prompt": "q"}, group_size=3, workflow_args={"how": "some"})
    (side,) = group.side
    assert [(rollout.id, rollout.index, rollout.reward) for rollout in side.rollouts] == [
        ("g0~other/0", 0, 0.0),
        ("g0~other/1", 1, 2.0),
    ]


def test_a_call_answers_one_task(make_place: MakePlace):
    with pytest.raises(ConfigError, match=r"returned call 0 in experiences of two tasks \(exp.eid.task\)"):
        make_place("yes").run(Alone, {"prompt": "q"}, workflow_args={"how": "both"})


class Lengths(Workflow):
    """Answers and judgements rewarded by their lengths, each kind compared with its own; judged in every second
    group."""

    can_repeat = True

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times = repeat_times

    def run(self):
        found = []
        index = int(str(self.task.task_id).rpartition("/")[2])
        for task in ("", "-judge") if index % 2 else ("",):
            answers = self.model.chat([{"role": "user", "content": f"?{task}"}], n=self.repeat_times, max_tokens=8)
            for number, answer in enumerate(answers):
                answer.reward = len(answer.response_text) + (1000.0 if task else 0.0)
                answer.eid.run, answer.eid.task = number, f"{self.task.task_id}{task}" if task else ""
            found += answers
        return found


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path, toy_dataset: Path) -> Path:
    """A run of two steps of four tasks, half of them with a group beside them."""
    root = tmp_path_factory.mktemp("side")
    tune(
        workflow_func=Lengths,
        train_dataset=DatasetConfig(path=str(toy_dataset), total_steps=2),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=4, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(root),
            "name": "n",
            "project": "p",
            "check.enabled": False,
            "task_args.prompt_key": "question",
            "evaluation.hold_out": False,
        },
    )
    return root / "p" / "n"


def test_both_kinds_are_trained_and_certified(run_dir: Path):
    groups = list(read_groups(run_dir / "run.db"))
    sides = {group.id: group for group in groups if group.beside is not None}
    assert {group.beside for group in sides.values()} == {
        group.id for group in groups if group.beside is None and int(group.task.id.rpartition("/")[2]) % 2
    }
    assert sides
    assert all(group.id == f"{group.beside}~judge" for group in sides.values())
    advantages: dict[str, list[float]] = defaultdict(list)
    with sqlite3.connect(run_dir / "run.db") as journal:
        for group_id, advantage in journal.execute("select group_id, advantage from trained"):
            advantages[group_id].append(advantage)
    assert set(sides) & set(advantages)
    for of_group in advantages.values():  # each kind is compared with its own alone
        assert sum(of_group) == pytest.approx(0, abs=1e-4)
        assert max(map(abs, of_group)) < 5
    assert main(["certify", str(run_dir)]) == 0
    assert main(["show", str(run_dir)]) == 0


def test_the_reward_of_a_run_is_that_of_its_tasks(run_dir: Path):
    """A judgement's reward is 1000 or more here."""
    means = [step.metrics["reward/mean"] for step in read_steps(run_dir / "run.db")]
    assert len(means) == 2
    assert max(means) < 100


def test_a_group_that_only_seems_to_be_at_a_side_breaks_the_certificate(run_dir: Path, tmp_path: Path, capsys: Any):
    """Red where the audit counts such groups among those that were asked for, or does not look for the other one."""
    for number, change in enumerate(("delete from side_groups", "update side_groups set beside = 'step-0/train/99'")):
        copy = tmp_path / str(number)
        shutil.copytree(run_dir, copy)
        with sqlite3.connect(copy / "run.db") as journal:
            journal.execute(change)
        assert main(["certify", str(copy)]) == 1
        assert "accounted" in capsys.readouterr().out


def test_a_journal_made_before_has_no_such_groups(run_dir: Path, tmp_path: Path):
    shutil.copytree(run_dir, tmp_path / "old")
    with sqlite3.connect(tmp_path / "old" / "run.db") as journal:
        journal.execute("drop table side_groups")
    assert {group.beside for group in read_groups(tmp_path / "old" / "run.db")} == {None}
