"""Workflows that make all rollouts of a group in one run (`can_repeat`): RULER, and the users' own."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trinity_serving import MakePlace

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.cli.main import main
from sharpen.compat.trinity import MultiTurnWorkflow, RewardFn, SimpleWorkflow, Workflow
from sharpen.compat.trinity.workflows.ruler import scores_in
from sharpen.errors import ConfigError
from sharpen.learning.experience.merge import merge
from sharpen.types import CallStatus, Outcome

GSM8K = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
KEYS = {"prompt_key": "question", "response_key": "answer"}


def counting(judgement: str) -> Any:
    """Answers n to the n-th request of the policy, and the judge's line to the judge."""
    said = iter(range(100))
    return lambda prompt: judgement if "Solution 1" in prompt else f"<think>.</think><answer>{next(said) + 40}</answer>"


@pytest.mark.parametrize("workflow", ["math_ruler_workflow", "async_math_ruler_workflow"])
def test_the_judge_sees_all_answers_of_the_group(make_place: MakePlace, workflow: str):
    """Red on the code before: the judge was shown one answer at a time."""
    place = make_place(counting("So it is [0.25, 1, -3, 0.5]"))
    (group,) = place.run(workflow, GSM8K, group_size=4, taskset=KEYS)
    judged = [prompt for prompt in place.engine.prompts if "Solution 1" in prompt]
    assert len(judged) == 1
    shown = re.findall(r"Solution (\d): .*<answer>(\d+)</answer>", judged[0])
    assert [number for number, _ in shown] == ["1", "2", "3", "4"]
    assert [rollout.id for rollout in group.rollouts] == ["g0/0", "g0/1", "g0/2", "g0/3"]
    assert [rollout.reward for rollout in group.rollouts] == [0.25, 1.0, 0.0, 0.5]
    for rollout, (_, answer) in zip(group.rollouts, shown, strict=True):
        (call,) = rollout.calls  # its own answer, and no other's
        assert (call.index, call.request, call.status) == (0, None, CallStatus.USED)
        assert f"<answer>{answer}</answer>" in call.response["content"]
        assert rollout.metrics["gold_reward"] == (1.1 if answer == "42" else 0.1)
        assert dict(rollout.call_rewards) == {0: rollout.reward}
        (experience,) = merge(rollout)
        assert experience.ids_T[experience.loss_mask_T].tolist() == call.sampled_ids_S.tolist()


def test_answers_of_a_group_have_noise_of_their_own(make_place: MakePlace):
    place = make_place(counting("[1, 0]"))
    place.run("math_ruler_workflow", GSM8K, group_size=2, taskset=KEYS)
    first, second = (request.noise for request in place.engine.requests[:2])
    assert first != second


def test_a_judgement_that_cannot_be_read_fails_the_group_and_is_asked_for_again(make_place: MakePlace):
    lines = iter(["no idea", "[1, 0]"])
    place = make_place(lambda prompt: next(lines) if "Solution 1" in prompt else "an answer")
    (group,) = place.run("math_ruler_workflow", GSM8K, group_size=2, taskset=KEYS, max_attempts=2)
    assert [(one.outcome, one.attempt, one.reward) for one in group.rollouts] == [
        (Outcome.OK, 1, 1.0),
        (Outcome.OK, 1, 0.0),
    ]
    assert [(one.id, one.attempt, len(one.calls)) for one in group.attempts] == [("g0/0", 0, 1), ("g0/1", 0, 1)]
    assert "no list of scores: 'no idea'" in str(group.attempts[0].error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.5, 1", "no list of scores"),
        ("[1, 'a']", "no list of scores"),
        ("[1]", "gave 1 scores for 2"),
        ("][", "no l"),
    ],
)
def test_scores_are_a_list_of_numbers(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        scores_in(text, 2)
    assert scores_in("[0, 0] no: [2, 0.5]", 2) == [1.0, 0.5]


class Episodes(MultiTurnWorkflow):
    """One conversation of two turns after the other, as environments are played; without a run id."""

    can_repeat = True

    def run(self):
        found = []
        for number in range(self.repeat_times):
            memory = [{"role": "system", "content": "Play."}]
            for turn in range(2):
                memory.append({"role": "user", "content": f"turn {turn}"})
                (answer,) = self.model.chat(memory, n=1)
                memory.append({"role": "assistant", "content": answer.response_text})
            found.append(self.process_messages_to_experience(memory, float(number)))
        return found


def test_episodes_one_after_the_other_are_one_rollout_each(make_place: MakePlace):
    moves = iter("abcdefgh")
    (group,) = make_place(lambda prompt: next(moves)).run(Episodes, group_size=3)
    said = [[call.response["content"] for call in rollout.calls] for rollout in group.rollouts]
    assert said == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, 2.0]
    for rollout in group.rollouts:
        assert [(call.index, call.parent) for call in rollout.calls] == [(0, None), (1, 0)]
        (experience,) = merge(rollout)
        assert set(experience.calls_T.tolist()) == {-1, 0, 1}


class Voted(SimpleWorkflow):
    """A user's own comparison on the simple workflow: what most answers say is right. Leaves the last one out."""

    def reset(self, task: Any) -> None:
        self._read(task)

    def run(self):
        answers = self.model.chat(self.format_messages(), **self.rollout_args)
        texts = [answer.response_text for answer in answers]
        for number, answer in enumerate(answers):
            answer.reward = texts.count(answer.response_text) / len(texts)
            answer.eid.run = self.run_id_base + number
        return answers[: self.task.workflow_args.get("kept", len(answers))]


def test_a_user_s_own_comparison(make_place: MakePlace):
    texts = iter(["x", "y", "x", "x"] * 2)
    place = make_place(lambda prompt: next(texts))
    (group,) = place.run(Voted, {"prompt": "q"}, group_size=4)
    assert sorted(rollout.reward for rollout in group.rollouts) == [0.25, 0.75, 0.75, 0.75]
    assert all(
        rollout.reward == (0.25 if "y" in str(rollout.calls[0].response) else 0.75) for rollout in group.rollouts
    )


def test_what_is_not_returned_fails_for_itself(make_place: MakePlace):
    (group,) = make_place("x").run(Voted, {"prompt": "q"}, group_size=3, workflow_args={"kept": 2}, max_attempts=3)
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.OK, Outcome.OK, Outcome.WORKFLOW_ERROR]
    assert "returned no experience" in str(group.rollouts[2].error)
    assert group.attempts == ()  # the others are not sampled again for it
    assert [len(rollout.calls) for rollout in group.rollouts] == [1, 1, 1]


class Wrong(Workflow):
    """Says what runs its experiences are of as told."""

    can_repeat = True

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times = repeat_times
        assert self.task.repeat_times == repeat_times

    def run(self):
        answers = self.model.chat([{"role": "user", "content": "?"}], n=self.repeat_times)
        how = self.task.workflow_args["how"]
        for answer in answers:
            answer.reward = 1.0
        if how == "run":
            answers[0].eid.run = 7
        if how == "twice":
            return [*answers, *self.conversation(answers)]
        return answers[:1] if how == "few" else answers

    def conversation(self, answers: Any) -> Any:
        again = self.model.convert_messages_to_experience(answers[0].messages)
        again.eid.run, again.reward = 1, 1.0
        return [again]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("run", "returned an experience of run 7 .*asked for 2 runs from 0 on"),
        ("twice", "returned call 0 in run 0 and in run 1"),
    ],
)
def test_whose_an_experience_is_must_be_clear(make_place: MakePlace, how: str, words: str):
    with pytest.raises(ConfigError, match=words):
        make_place("yes").run(Wrong, {"prompt": "q"}, group_size=2, workflow_args={"how": how})


def test_too_few_experiences_without_a_run_fail_the_group(make_place: MakePlace):
    (group,) = make_place("yes").run(Wrong, {"prompt": "q"}, group_size=2, workflow_args={"how": "few"})
    assert {rollout.outcome for rollout in group.rollouts} == {Outcome.WORKFLOW_ERROR}
    assert "returned 1 experiences for 2 runs" in str(group.rollouts[0].error)


def test_the_limit_of_calls_holds_for_each_rollout(make_place: MakePlace):
    (group,) = make_place("x", max_calls=2).run(Episodes, group_size=3)
    assert {rollout.outcome for rollout in group.rollouts} == {Outcome.OK}
    (group,) = make_place("x", max_calls=1).run(Episodes, group_size=3)
    assert {rollout.outcome for rollout in group.rollouts} == {Outcome.CALL_LIMIT}


class Picky(RewardFn):
    """Fails on an answer that it does not like."""

    def __call__(self, response: str, truth: str) -> dict[str, float]:
        if "bad" in response:
            raise RuntimeError("I do not like it")
        return {"good": 1.0}


@pytest.mark.parametrize("workflow", ["simple_workflow", "async_simple_workflow", "math_boxed_workflow"])
def test_workflows_that_score_answers_one_by_one_fail_one_by_one(make_place: MakePlace, workflow: str):
    texts = iter(["good", "bad", "good"])
    taskset = {**KEYS, "reward_fn": f"{__name__}:Picky"}
    (group,) = make_place(lambda prompt: next(texts)).run(workflow, GSM8K, group_size=3, taskset=taskset)
    assert sorted(rollout.outcome for rollout in group.rollouts) == [Outcome.OK, Outcome.OK, Outcome.WORKFLOW_ERROR]


class Longest(Workflow):
    """The longest of the group's answers gets 1."""

    can_repeat = True
    is_async = True

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times = repeat_times

    async def run_async(self):
        messages = [{"role": "user", "content": self.task.task_desc}]
        answers = await self.model.chat_async(messages, n=self.repeat_times, max_tokens=6)
        longest = max(len(answer.response_text) for answer in answers)
        for number, answer in enumerate(answers):
            answer.reward, answer.eid.run = float(len(answer.response_text) == longest), number
        return answers


def test_a_run_of_whole_groups_is_certified(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, capsys):
    settings = {
        "checkpoint_root_dir": str(tmp_path),
        "task_args.prompt_key": "question",
        "name": "groups",
        "project": "p",
        "check.enabled": False,
    }
    result = tune(
        workflow_func=Longest,
        train_dataset=DatasetConfig(path=str(toy_dataset), total_steps=2),
        eval_dataset=DatasetConfig(path=str(toy_dataset), split="test"),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
        settings=settings,
    )
    assert result.steps == 2
    (run,) = tmp_path.rglob("run.db")
    with sqlite3.connect(run) as journal:
        rollouts = journal.execute(
            "select group_id, idx, reward, (select count(*) from calls where rollout_key = rollouts.key) from rollouts"
        ).fetchall()
    assert {count for *_, count in rollouts} == {1}
    groups: dict[str, list[float]] = {}
    for group_id, _, reward, _ in rollouts:
        groups.setdefault(group_id, []).append(reward)
    trained = [rewards for rewards in groups.values() if len(rewards) == 4]
    assert len(trained) == 4
    assert all(max(rewards) == 1.0 for rewards in trained)
    assert np.mean([min(rewards) for rewards in trained]) < 1.0
    assert main(["certify", str(run.parent)]) == 0
