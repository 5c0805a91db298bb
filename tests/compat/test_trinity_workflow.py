"""Workflow classes written for Trinity, run by our runner: what they receive, what becomes of what they return."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading

import openai
import pytest
from trinity_serving import MakePlace

from sharpen.compat.trinity import Experience, ModelWrapper, Task, Workflow, configured_workflow
from sharpen.config.public import AlgorithmConfig, DatasetConfig, TunerModelConfig
from sharpen.config.run import LossConfig, RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.experience.merge import merge
from sharpen.types import CallStatus, Outcome


def ask(client: openai.OpenAI, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    reply = client.chat.completions.create(model=client.model_path, messages=messages)
    return reply.choices[0].message.content or ""


class Documented(Workflow):
    """In the manner of the guide: its constructor does not call the base's, and only `run_async` is there."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[openai.OpenAI] | None = None):
        self.client = model.get_openai_async_client()
        self.query = task.raw_task.get(task.format_args.prompt_key)

    async def run_async(self):
        messages = [{"role": "user", "content": self.query}]
        reply = await self.client.chat.completions.create(model=self.client.model_path, messages=messages)
        exps = self.model.extract_experience_from_history()
        for exp in exps:
            exp.reward = float(reply.choices[0].message.content == "yes")
            exp.metrics = {"length": len(exp.response_text)}
        return exps


class Threaded(Workflow):
    """Blocks, and uses a database connection that belongs to one thread."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.database = sqlite3.connect(":memory:")

    def run(self):
        self.database.execute("create table answers (text)")
        self.database.execute("insert into answers values (?)", (ask(self.model.get_openai_client(), "?"),))
        (count,) = self.database.execute("select count(*) from answers").fetchone()
        self.database.close()
        exps = self.model.extract_experience_from_history()
        exps[-1].reward = count
        return exps


class TwoOfThree(Workflow):
    """Makes three calls, and returns the first and the last, with rewards of their own."""

    def run(self):
        rewards = self.task.workflow_args.get("rewards", [0.25, 1.0])
        for word in ("one", "two", "three"):
            ask(self.model.get_openai_client(), word)
        exps = self.model.extract_experience_from_history()
        kept = [exps[0], exps[2]]
        for exp, reward in zip(kept, rewards, strict=True):
            exp.reward = reward
        return kept


def test_the_documented_workflow_runs(make_place: MakePlace):
    rollout = make_place("yes").one(Documented, {"question": "2+2?"}, taskset={"prompt_key": "question"})
    assert (rollout.outcome, rollout.reward, rollout.error) == (Outcome.OK, 1.0, None)
    assert rollout.call_rewards == {0: 1.0}
    assert rollout.metrics["length"] == 3.0
    assert [call.messages for call in rollout.calls] == [({"role": "user", "content": "2+2?"},)]
    assert rollout.calls[0].status == CallStatus.USED


def test_a_synchronous_workflow_lives_in_one_thread(make_place: MakePlace):
    group = make_place("yes").run(Threaded, group_size=4)[0]
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 4
    assert all(rollout.outcome == Outcome.OK for rollout in group.rollouts)


def test_calls_that_are_not_returned_are_not_trained(make_place: MakePlace):
    rollout = make_place("yes").one(TwoOfThree)
    assert [call.status for call in rollout.calls] == [CallStatus.USED, CallStatus.LEFT_OUT, CallStatus.USED]
    assert rollout.call_rewards == {0: 0.25, 2: 1.0}
    assert rollout.reward == 1.0  # that of the last call
    trained = [set(experience.calls_T.tolist()) - {-1} for experience in merge(rollout)]
    assert trained == [{0}, {2}]


def test_rewards_that_differ_are_said_once(make_place: MakePlace, caplog):
    place = make_place("yes")
    with caplog.at_level(logging.WARNING, "sharpen.workflow"):
        place.run(TwoOfThree, group_size=3, no_use_in="grpo", workflow_args={"rewards": [1.0, 1.0]})
        place.run(TwoOfThree, group_size=3)
        assert caplog.messages == []
        place.run(TwoOfThree, group_size=3, no_use_in="grpo")
    assert len(caplog.messages) == 1
    assert "TwoOfThree rewards the calls of a rollout differently, but grpo trains all of them" in caplog.messages[0]


@pytest.mark.parametrize(
    ("algorithm", "advantage", "said"),
    [
        ("grpo", None, True),
        ("multi_step_grpo", None, False),  # defined by the last step's reward
        ("grpo", "step_wise_grpo", False),
        ("multi_step_grpo", "grpo", True),
        ("grpo", "step_rewards", True),  # adds up rewards of steps, which these are not
        ("ppo", None, True),
        ("ppo", "call_gae", False),  # each call by itself
    ],
)
def test_which_algorithms_have_no_use_for_them(make_place: MakePlace, caplog, algorithm, advantage, said):
    config = RunConfig(
        train_dataset=DatasetConfig(path="none"),
        model=TunerModelConfig(model_path="none", max_model_len=64),
        algorithm=AlgorithmConfig(algorithm_type=algorithm),
        loss=LossConfig(advantage=advantage),
    )
    with caplog.at_level(logging.WARNING, "sharpen.workflow"):
        make_place("yes").run(configured_workflow(TwoOfThree, None, config))
    assert len(caplog.messages) == said
    assert all(algorithm in message for message in caplog.messages)


def test_a_function_is_left_as_it_is_and_arguments_of_a_class_beside_it_are_said_to_have_no_effect(caplog):
    async def function(task, model):
        return 1.0

    config = {"train_dataset": DatasetConfig(path="none"), "model": TunerModelConfig(model_path="m", max_model_len=64)}
    with caplog.at_level(logging.WARNING, "sharpen.workflow"):
        assert configured_workflow(function, None, RunConfig(**config)) is function
        assert caplog.messages == []
        assert configured_workflow(function, None, RunConfig(**config, task_args={"prompt_key": "q"})) is function
    assert caplog.messages == ["task_args.prompt_key: no effect: the workflow is a function, which reads the row"]


def test_arguments_of_a_class_that_are_none_or_wrong_are_said_with_the_nearest_name():
    """Red when `task_args` are taken as they are: `prompt_kye` would leave every task without its question."""
    config = {"train_dataset": DatasetConfig(path="none"), "model": TunerModelConfig(model_path="m", max_model_len=64)}
    wrong = RunConfig(**config, task_args={"prompt_kye": "q", "rollout_args": 3})
    with pytest.raises(ConfigError) as caught:
        configured_workflow(TwoOfThree, None, wrong)
    message = str(caught.value)
    assert "task_args" in message
    assert "did you mean 'prompt_key'?" in message
    assert "'rollout_args' must be a section of settings, got 3" in message


class Masked(Workflow):
    def run(self):
        ask(self.model.get_openai_client(), "?")
        (exp,) = self.model.extract_experience_from_history()
        exp.reward = 0.5
        exp.action_mask = exp.action_mask & False
        return [exp]


def test_a_masked_experience_counts_but_is_not_trained(make_place: MakePlace):
    rollout = make_place("yes").one(Masked)
    assert (rollout.reward, dict(rollout.call_rewards)) == (0.5, {})
    assert [call.status for call in rollout.calls] == [CallStatus.LEFT_OUT]
    assert merge(rollout) == []


class Bad(Workflow):
    """Returns what `workflow_args.what` says."""

    def run(self):
        ask(self.model.get_openai_client(), "?")
        first = self.model.extract_experience_from_history()
        ask(self.auxiliary_models[0], "?")
        for exp in first:
            exp.reward = 1.0
        return BAD[self.task.workflow_args["what"]](self, first)


def _dict_reward(workflow, exps):
    exps[0].reward = {"accuracy": 1.0}


def _set_reward(value):
    def returned(workflow, exps):
        exps[0].reward = value
        return exps

    return returned


def _changed(workflow, exps):
    exps[0].tokens[0] = 7
    return exps


def _two_runs(workflow, exps):
    ask(workflow.model.get_openai_client(), "again")
    more = workflow.model.extract_experience_from_history()
    more[0].reward, more[0].eid.run = 0.0, 1
    return exps + more


def _of_the_helper(workflow, exps):
    helper = workflow.auxiliary_model_wrappers[0]
    (exp,) = helper.chat([{"role": "user", "content": "?"}])
    exp.reward = 1.0
    return [exp]


def _disagreeing(workflow, exps):
    whole = workflow.model.convert_messages_to_experience(exps[0].messages)
    whole.reward = 0.5
    return [*exps, whole]


BAD = {
    "nothing": lambda workflow, exps: None,
    "number": lambda workflow, exps: 1.0,
    "texts": lambda workflow, exps: ["yes"],
    "dict reward": _dict_reward,
    "changed": _changed,
    "two runs": _two_runs,
    "helper": _of_the_helper,
    "disagreeing": _disagreeing,
    "made": lambda workflow, exps: [Experience(tokens=[1, 2], reward=1.0)],
    "made of nothing": lambda workflow, exps: [Experience(reward=1.0)],
    "history": lambda workflow, exps: workflow.auxiliary_model_wrappers[0].extract_experience_from_history(),
    "empty": lambda workflow, exps: [],
    "no reward": _set_reward(None),
    "nan": _set_reward(float("nan")),
    "infinite": _set_reward(float("inf")),
    "absent": lambda workflow, exps: workflow.model.logprobs([1]),
}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "workflow Bad returned None (NoneType): return a list of Experience"),
        ("number", "workflow Bad returned 1.0 (float)"),
        ("texts", "workflow Bad returned ['yes'] (list)"),
        ("dict reward", "exp.reward must be a number, got {'accuracy': 1.0} (dict) (the sum of"),
        ("changed", "exp.tokens was changed in place"),
        ("two runs", "experiences of 2 runs (exp.eid.run)"),
        ("helper", "experience of another rollout, or of an auxiliary model"),
        ("disagreeing", "call 0 in two experiences with different rewards, 1 and 0.5"),
        ("made", "workflow Bad constructed an Experience of 2 tokens, which are not those of any recorded call"),
        ("made of nothing", "workflow Bad constructed an Experience without tokens"),
        ("history", "the calls of the auxiliary model 'helper' are never trained"),
    ],
)
def test_what_would_fail_every_rollout_stops_the_run(make_place: MakePlace, what, words):
    with pytest.raises(ConfigError) as error:
        make_place("yes").run(Bad, workflow_args={"what": what})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("empty", "workflow Bad returned no experience"),
        ("no reward", "returned an experience without a reward: set exp.reward"),
        ("nan", "set the reward nan: it must be a finite number"),
        ("infinite", "set the reward inf: it must be a finite number"),
        ("absent", "ModelWrapper.logprobs is not available here (logprobs of tokens that were not sampled"),
    ],
)
def test_what_may_be_one_rollouts_alone_fails_that_one(make_place: MakePlace, what, words):
    rollout = make_place("yes").one(Bad, workflow_args={"what": what})
    assert (rollout.outcome, rollout.reward) == (Outcome.WORKFLOW_ERROR, None)
    assert words in rollout.error


KEPT: list[Experience] = []


class Keeping(Workflow):
    """Keeps experiences from one rollout to the next, as a module-level list does."""

    def run(self):
        ask(self.model.get_openai_client(), "?")
        KEPT.extend(self.model.extract_experience_from_history())
        for exp in KEPT:
            exp.reward = 1.0
        return list(KEPT)


def test_experiences_of_another_rollout_fail_the_one_that_returns_them(make_place: MakePlace):
    """They show from the second rollout on, when one has ended well: no reward is given to what another one said."""
    KEPT.clear()
    first, second = make_place("yes").run(Keeping, {"prompt": "a"}, {"prompt": "b"}, max_concurrent_rollouts=1)
    assert (first.rollouts[0].outcome, first.rollouts[0].reward) == (Outcome.OK, 1.0)
    assert (second.rollouts[0].outcome, second.rollouts[0].reward) == (Outcome.WORKFLOW_ERROR, None)
    assert "keep none from one rollout to the next" in second.rollouts[0].error


def test_experiences_of_another_rollout_stop_the_run_where_none_has_ended_well(make_place: MakePlace):
    place = make_place("yes")
    KEPT.clear()
    place.run(Keeping)
    with pytest.raises(ConfigError, match="keep none from one rollout to the next"):
        place.run(Keeping)  # another runner's first


class Swallowing(Workflow):
    """Catches the model's failure and has nothing to return."""

    def run(self):
        try:
            ask(self.model.get_openai_client(), "x" * 200)
        except openai.BadRequestError:
            return []
        raise AssertionError("it fits")


def test_what_the_model_caused_keeps_its_cause(make_place: MakePlace):
    rollout = make_place("yes", max_model_len=64).one(Swallowing)
    assert (rollout.outcome, rollout.reward) == (Outcome.CONTEXT_OVERFLOW, None)


class Crowded(Workflow):
    """Asks for its own number several times, all at once."""

    is_async = True

    async def run_async(self):
        number = self.task.raw_task["prompt"]
        assert self.task.workflow_args == {"seen": []}
        self.task.workflow_args["seen"].append(number)
        messages = [{"role": "user", "content": number}]
        answers = await asyncio.gather(*(self.model.chat_async(messages, max_tokens=20) for _ in range(3)))
        await asyncio.sleep(0)
        exps = self.model.extract_experience_from_history()
        assert [exp for (exp,) in answers] == exps or {id(e) for (e,) in answers} == {id(e) for e in exps}
        for exp in exps:
            exp.reward = float(exp.response_text == f"it is {number}")
            exp.metrics["threads"] = threading.active_count()
        return exps


class CrowdedThreads(Workflow):
    """The same with a blocking client."""

    def run(self):
        number = self.task.raw_task["prompt"]
        for _ in range(3):
            assert ask(self.model.get_openai_client(), number) == f"it is {number}"
        exps = self.model.extract_experience_from_history()
        for exp in exps:
            exp.reward = float(exp.response_text == f"it is {number}")
        return exps


@pytest.mark.parametrize("workflow", [Crowded, CrowdedThreads])
def test_concurrent_rollouts_see_their_own_calls_only(make_place: MakePlace, workflow):
    place = make_place(lambda prompt: "it is " + prompt.split("user\n")[1].split("<|im_end|>")[0])
    rows = [{"prompt": f"{i:03d}"} for i in range(40)]
    groups = place.run(workflow, *rows, group_size=2, workflow_args={"seen": []}, max_concurrent_rollouts=80)
    for row, group in zip(rows, groups, strict=True):
        for rollout in group.rollouts:
            assert (rollout.reward, rollout.error) == (1.0, None)
            assert dict(rollout.call_rewards) == {0: 1.0, 1: 1.0, 2: 1.0}
            assert {call.messages[0]["content"] for call in rollout.calls} == {row["prompt"]}


class Evaluated(Workflow):
    def run(self):
        ask(self.model.get_openai_client(), "?")
        exps = self.model.extract_experience_from_history()
        for exp in exps:
            exp.reward = float(self.task.is_eval)
        return exps


def test_evaluations_work_and_say_that_they_are(make_place: MakePlace):
    place = make_place("yes")
    assert place.one(Evaluated).reward == 0.0
    evaluated = place.one(Evaluated, record=False)
    assert (evaluated.reward, evaluated.calls, evaluated.error) == (1.0, (), None)


class LooksAtItsRow(Workflow):
    def run(self):
        assert self.task.workflow_args == {"side": "good"}
        assert "workflow_args" not in self.task.raw_task
        ask(self.model.get_openai_client(), "?")
        exps = self.model.extract_experience_from_history()
        for exp in exps:
            exp.reward = 1.0
        return exps


def test_a_class_has_its_arguments_beside_the_row_and_not_in_it(make_place: MakePlace):
    found = make_place("yes").one(LooksAtItsRow, workflow_args={"side": "good"})
    assert (found.reward, found.error) == (1.0, None)


class Peeking(Workflow):
    def run(self):
        client = self.model.get_openai_client()
        assert client is self.model.get_openai_client()
        assert (self.task.task_id, self.task.index, self.task.repeat_times) == ("g0", {"rollout": 0}, 1)
        ask(client, "one")
        kept = self.model.extract_experience_from_history(clear_history=False)
        ask(client, "two")
        both = self.model.extract_experience_from_history()
        assert both[0] is kept[0]
        assert [exp.messages[0]["content"] for exp in both] == ["one", "two"]
        assert self.model.extract_experience_from_history() == []
        assert (self.model.model_path, self.model.model_name, self.model.model_version) == ("toy", "toy", 3)
        for exp in both:
            exp.reward = 1.0
        return both


def test_the_history_is_kept_until_it_is_cleared(make_place: MakePlace):
    rollout = make_place("yes").one(Peeking)
    assert (rollout.error, rollout.reward) == (None, 1.0)


class OverHttp(Workflow):
    def run(self):
        client = openai.OpenAI(base_url=f"{self.model.api_address}/v1", api_key=self.model.api_key)
        with client:
            reply = client.chat.completions.create(
                model=self.model.model_path, messages=[{"role": "user", "content": "?"}]
            )
        assert reply.choices[0].message.content == "yes"
        exps = self.model.extract_experience_from_history()
        exps[0].reward = 1.0
        return exps


def test_any_client_of_the_address_is_recorded(make_place: MakePlace):
    rollout = make_place("yes").one(OverHttp)
    assert (rollout.error, dict(rollout.call_rewards)) == (None, {0: 1.0})


class Repeatable(Workflow):
    can_repeat = True

    def set_repeat_times(self, repeat_times, run_id_base):
        self.times = (repeat_times, run_id_base)

    def run(self):
        ask(self.model.get_openai_client(), "?")
        exps = self.model.extract_experience_from_history()
        exps[0].reward = float(self.times == (1, 0))
        return exps


def test_a_repeatable_workflow_is_asked_to_run_once(make_place: MakePlace):
    assert make_place("yes").one(Repeatable).reward == 1.0
