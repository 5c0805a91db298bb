"""Trinity's workflow bases: simple, math, conversations, steps; and auxiliary models by annotation."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import openai
import pytest
from trinity_serving import MakePlace, Place

from sharpen.compat.trinity import (
    AsyncMathBoxedWorkflow,
    AsyncMathWorkflow,
    AsyncRewardPropagationWorkflow,
    AsyncSimpleWorkflow,
    AsyncStepWiseRewardWorkflow,
    MathBoxedWorkflow,
    MathWorkflow,
    ModelWrapper,
    MultiTurnWorkflow,
    RewardFn,
    RewardPropagationWorkflow,
    SimpleWorkflow,
    StepWiseRewardWorkflow,
    Task,
    Workflow,
    workflow_function,
)
from sharpen.compat.trinity.task import TasksetConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.learning.experience.merge import merge
from sharpen.types import CallStatus, Outcome

if TYPE_CHECKING:
    from openai import AsyncOpenAI

GSM8K = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
KEYS = {"prompt_key": "question", "response_key": "answer"}


class Says(RewardFn):
    """A reward function of the user's own, with an argument."""

    def __init__(self, word: str = "yes") -> None:
        self.word = word

    def __call__(self, response: str, truth: str) -> dict[str, float]:
        return {"said": float(self.word in response), "bonus": 0.5}


def trained(place: Place, *arguments: Any, **options: Any) -> list[int]:
    rollout = place.one(*arguments, **options)
    return [call.index for call in rollout.calls if call.status == CallStatus.USED]


@pytest.mark.parametrize("workflow", ["simple_workflow", SimpleWorkflow, AsyncSimpleWorkflow])
def test_a_simple_workflow_asks_and_scores(make_place: MakePlace, workflow: Any):
    place = make_place("yes, so it is")
    taskset = {**KEYS, "system_prompt": "Be brief.", "reward_fn": f"{__name__}:Says", "reward_fn_args": {"word": "so"}}
    taskset["rollout_args"] = {"max_tokens": 100, "temperature": 0.7, "top_k": -1, "logprobs": 0}
    rollout = place.one(workflow, GSM8K, taskset=taskset)
    assert (rollout.reward, rollout.error) == (1.5, None)
    assert rollout.metrics == {"said": 1.0, "bonus": 0.5}
    assert [message["role"] for message in rollout.calls[0].messages] == ["system", "user"]
    assert rollout.calls[0].sampling.temperature == 0.7
    assert rollout.calls[0].sampling.max_tokens == 100


def test_a_reply_prefix_begins_the_answer(make_place: MakePlace):
    place = make_place("yes")
    taskset = {**KEYS, "reply_prefix": "Well,", "reward_fn": f"{__name__}:Says"}
    assert place.one(SimpleWorkflow, GSM8K, taskset=taskset).reward == 1.5
    assert place.engine.prompts[0].endswith("<|im_start|>assistant\nWell,")


@pytest.mark.parametrize("workflow", [MathWorkflow, AsyncMathWorkflow, "math_workflow", "async_math_workflow"])
@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        ("<think>6 * 7</think>\n<answer>42</answer>", {"accuracy": 1.0, "format_score": 0.1}),
        ("<answer>42</answer>", {"accuracy": 1.0, "format_score": -0.1}),
        ("<think>6 * 7</think>\n<answer>43</answer>", {"accuracy": 0.0, "format_score": 0.1}),
    ],
)
def test_the_math_workflow_sees_the_thinking(make_place: MakePlace, workflow: Any, answer: str, scores: Any):
    place = make_place(answer, reasoning_parser="deepseek_r1")  # which would take the thinking out of the content
    rollout = place.one(workflow, GSM8K, taskset=KEYS)
    assert rollout.metrics == scores
    assert rollout.reward == pytest.approx(sum(scores.values()))
    assert "<answer>" in rollout.calls[0].messages[0]["content"]


@pytest.mark.parametrize("workflow", [MathBoxedWorkflow, AsyncMathBoxedWorkflow, "math_boxed_workflow"])
def test_the_boxed_math_workflow(make_place: MakePlace, workflow: Any):
    place = make_place("It is \\boxed{42}.")
    assert place.one(workflow, GSM8K, taskset=KEYS).reward == 1.0
    args = {"with_think": True, "format_score_coef": 0.2}
    rollout = place.one(workflow, GSM8K, taskset=KEYS, workflow_args=args)
    assert (rollout.reward, rollout.metrics) == (0.8, {"accuracy": 1.0, "format_score": -0.2})


def test_workflows_of_distillation_ask_and_their_reward_teaches_nothing(make_place: MakePlace):
    place = make_place("It is \\boxed{42}.")
    plain = place.one("on_policy_distill_workflow", GSM8K, taskset={**KEYS, "system_prompt": "Be brief."})
    assert (plain.reward, plain.error) == (0.0, None)
    assert [message["role"] for message in plain.calls[0].messages] == ["system", "user"]
    right = place.one("on_policy_distill_math_workflow", GSM8K, taskset=KEYS, workflow_args={"temperature": 1.0})
    assert (right.reward, right.metrics) == (1.0, {"accuracy": 1.0})
    assert "How many?" in right.calls[0].messages[1]["content"]
    assert "\\boxed{}" in right.calls[0].messages[1]["content"]
    with pytest.raises(ConfigError, match=r"workflow_args.temperature is 0.5: the teacher is compared with at 1 here"):
        place.run("on_policy_distill_workflow", GSM8K, taskset=KEYS, workflow_args={"temperature": 0.5})


def test_a_boxed_answer_that_was_cut_is_scored_but_not_trained(make_place: MakePlace):
    place = make_place("It is \\boxed{42}. And furthermore")
    taskset = {**KEYS, "rollout_args": {"max_tokens": 8}}
    rollout = place.one(MathBoxedWorkflow, GSM8K, taskset=taskset)
    assert (rollout.reward, rollout.calls[0].finish_reason) == (0.0, "length")
    assert rollout.calls[0].status == CallStatus.LEFT_OUT


def test_settings_that_a_simple_workflow_needs(make_place: MakePlace):
    with pytest.raises(
        ConfigError, match=r"SimpleWorkflow scores answers with a reward function: set task_args\.reward_fn"
    ):
        make_place("yes").run(SimpleWorkflow, GSM8K, taskset=KEYS)
    with pytest.raises(DatasetError, match="the task has no field 'prompt'"):
        make_place("yes").run(MathWorkflow, GSM8K)


@pytest.mark.parametrize("workflow", [MathBoxedWorkflow, AsyncMathBoxedWorkflow])
def test_a_base_model_is_asked_in_plain_text(make_place: MakePlace, workflow: type[MathBoxedWorkflow]):
    """Red where `use_base` is not read: then the chat template's tokens stand around the question."""
    place = make_place("It is \\boxed{42}")
    taskset = {**KEYS, "system_prompt": "Be brief."}
    rollout = place.one(workflow, GSM8K, taskset=taskset, workflow_args={"use_base": True})
    assert place.engine.prompts == [f"System:Be brief.\nUser:\n{GSM8K['question']}\nAssistant:\n"]
    assert (rollout.reward, rollout.calls[0].status) == (1.0, CallStatus.USED)


def test_a_base_models_answer_may_be_begun(make_place: MakePlace):
    place = make_place("\\boxed{42}")
    taskset = {**KEYS, "system_prompt": "", "reply_prefix": "It is "}
    place.one(MathBoxedWorkflow, GSM8K, taskset=taskset, workflow_args={"use_base": True})
    assert place.engine.prompts == [f"User:\n{GSM8K['question']}\nAssistant:\nIt is "]


class Game(MultiTurnWorkflow):
    """Counts on, after an example in the prompt that nobody was asked for."""

    can_repeat = True

    def run(self):
        assert self.repeat_times == 1
        memory = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "an example"}]
        for turn in range(3):
            memory.append({"role": "user", "content": f"turn {turn}"})
            (answer,) = self.model.chat(memory, n=1)
            memory.append({"role": "assistant", "content": answer.response_text})
        self.model.chat([{"role": "user", "content": "an aside"}])
        info = {"rounds": 3, "done": True, "note": "well played"}
        exp = self.process_messages_to_experience(memory, 0.75, info)
        assert exp.action_mask.tolist().count(True) == sum(len(call.sampled_ids_S) for call in exp.calls)
        assert exp.tokens.tolist()[: exp.prompt_length] == exp.calls[0].prompt_ids_P.tolist()
        sampled = exp.tokens[exp.prompt_length :][exp.action_mask].tolist()
        assert sampled == [i for call in exp.calls for i in call.sampled_ids_S.tolist()]
        assert exp.logprobs[exp.action_mask].tolist() == [-1.0, -2.0] * 3
        assert float(exp.logprobs[~exp.action_mask].abs().sum()) == 0.0
        return [exp]


def test_a_conversation_is_one_experience_of_its_calls(make_place: MakePlace):
    rollout = make_place("yes").one(Game)
    assert (rollout.error, rollout.reward) == (None, 0.75)
    assert dict(rollout.call_rewards) == {0: 0.75, 1: 0.75, 2: 0.75}
    assert rollout.calls[3].status == CallStatus.LEFT_OUT
    assert rollout.metrics == {"rounds": 3.0, "done": 1.0}
    (experience,) = merge(rollout)  # the three calls are one token sequence
    assert set(experience.calls_T.tolist()) == {-1, 0, 1, 2}


class Invented(MultiTurnWorkflow):
    def run(self):
        self.model.chat([{"role": "user", "content": "?"}])
        memory = [{"role": "user", "content": "!"}, {"role": "assistant", "content": "yes"}]
        return [self.process_messages_to_experience(memory, 1.0)]


class Altered(MultiTurnWorkflow):
    """Two answers to one question, and a conversation that holds neither."""

    def run(self):
        memory = [{"role": "user", "content": "?"}]
        self.model.chat(memory, n=2)
        memory.append({"role": "assistant", "content": "no"})
        return [self.process_messages_to_experience(memory, 1.0)]


@pytest.mark.parametrize(
    ("workflow", "words"),
    [
        (Invented, "none of the rollout's 1 calls made this conversation"),
        (Altered, r"messages\[1\] is none of the answers"),
    ],
)
def test_a_conversation_that_was_not_sampled_is_an_error(make_place: MakePlace, workflow: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        make_place("yes").run(workflow)


class Climb(StepWiseRewardWorkflow):
    """One call a step; the last step's reward is its number."""

    max_step_num = 5

    def step(self, step_num: int) -> bool:
        self.client.chat.completions.create(
            model=self.client.model_path, messages=[{"role": "user", "content": str(step_num)}]
        )
        return step_num < self.task.workflow_args.get("last", 2)

    def reward(self, exps: Any, step_num: int) -> float:
        assert len(exps) == 1
        return 0.1 * step_num


class AsyncClimb(AsyncStepWiseRewardWorkflow):
    max_step_num = 5

    async def step_async(self, step_num: int) -> bool:
        await self.model.chat_async([{"role": "user", "content": str(step_num)}])
        return step_num < self.task.workflow_args.get("last", 2)

    async def reward_async(self, exps: Any, step_num: int) -> float:
        return 0.1 * step_num


class Walk(RewardPropagationWorkflow):
    max_step_num = 5

    def step(self, step_num: int) -> bool:
        self.model.chat([{"role": "user", "content": str(step_num)}])
        return step_num < self.task.workflow_args.get("last", 2)

    def reward(self, exps: Any) -> float:
        assert [exp.eid.step for exp in exps] == list(range(len(exps)))
        return float(len(exps))


class AsyncWalk(AsyncRewardPropagationWorkflow):
    max_step_num = 5

    async def step_async(self, step_num: int) -> bool:
        await self.model.chat_async([{"role": "user", "content": str(step_num)}])
        return step_num < self.task.workflow_args.get("last", 2)

    async def reward_async(self, exps: Any) -> float:
        return float(len(exps))


@pytest.mark.parametrize("workflow", [Climb, AsyncClimb])
def test_each_step_has_its_reward(make_place: MakePlace, workflow: Any):
    place = make_place("yes")
    rollout = place.one(workflow)
    assert dict(rollout.call_rewards) == pytest.approx({0: 0.0, 1: 0.1, 2: 0.2})
    assert rollout.reward == pytest.approx(0.2)
    assert len(place.one(workflow, workflow_args={"last": 99}).calls) == 5


@pytest.mark.parametrize("workflow", [Walk, AsyncWalk])
def test_one_reward_goes_to_all_steps(make_place: MakePlace, workflow: Any):
    rollout = make_place("yes").one(workflow)
    assert dict(rollout.call_rewards) == {0: 3.0, 1: 3.0, 2: 3.0}
    assert rollout.metrics == {"actual_env_steps": 3.0}


class OfClients(Workflow):
    """The English edition's annotation."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[openai.OpenAI] | None = None):
        self.given = auxiliary_models

    def run(self):
        assert type(self.given[0]) is openai.OpenAI
        return judged(self, self.given[0])


class OfWrappers(Workflow):
    """The Chinese edition's annotation."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.given = auxiliary_models

    def run(self):
        assert type(self.given[0]) is ModelWrapper
        return judged(self, self.given[0].get_openai_client())


class OfClientsToBase(OfClients):
    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[openai.OpenAI] | None = None):
        Workflow.__init__(self, task=task, model=model, auxiliary_models=auxiliary_models)
        self.given = auxiliary_models


class Inherited(OfClients):
    """No constructor of its own that names them: the base's annotation counts."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)


class Unannotated(OfWrappers):
    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)


class None_(Workflow):
    """Takes no auxiliary models at all; the base has them."""

    def __init__(self, *, task: Task, model: ModelWrapper) -> None:
        super().__init__(task=task, model=model)

    def run(self):
        assert self.auxiliary_models is None
        return judged(self, None)


def judged(workflow: Workflow, client: Any) -> Any:
    """One call of the policy, scored by one of the helper through every way to it."""
    workflow.model.chat([{"role": "user", "content": "?"}])
    reward = 1.0
    if client is not None:
        assert client.model_path == "helper"
        assert [wrapper.model_path for wrapper in workflow.auxiliary_model_wrappers] == ["helper"]
        for judge in (client, workflow.auxiliary_models[0]):
            messages = [{"role": "user", "content": "how good?"}]
            reply = judge.chat.completions.create(model=judge.model_path, messages=messages)
            reward = float(reply.choices[0].message.content)
    exps = workflow.model.extract_experience_from_history()
    for exp in exps:
        exp.reward = reward
    return exps


@pytest.mark.parametrize("workflow", [OfClients, OfWrappers, OfClientsToBase, Inherited, Unannotated, None_])
def test_auxiliary_models_come_as_the_constructor_says(make_place: MakePlace, workflow: Any):
    rollout = make_place(lambda prompt: "0.5" if "how good" in prompt else "yes").one(workflow)
    assert rollout.error is None
    assert rollout.reward == (1.0 if workflow is None_ else 0.5)
    assert dict(rollout.call_rewards) == {0: rollout.reward}  # the helper's calls are in no rollout
    assert len(rollout.calls) == 1


class OfAsyncClients(Workflow):
    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: list[openai.AsyncOpenAI] | None = None
    ) -> None:
        self.given = auxiliary_models

    async def run_async(self):
        (judge,) = self.given
        assert type(judge) is openai.AsyncOpenAI
        return await judged_async(self, judge)


class NamedLater(OfAsyncClients):
    """Named for type checkers only, so that the annotation stays text."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[AsyncOpenAI] | None = None) -> None:
        self.given = auxiliary_models


class AsyncByDefault(Workflow):
    """An asynchronous workflow has asynchronous clients in `auxiliary_models`."""

    async def run_async(self):
        assert type(self.auxiliary_models[0]) is openai.AsyncOpenAI
        return await judged_async(self, self.auxiliary_models[0])


async def judged_async(workflow: Workflow, judge: Any) -> Any:
    await workflow.model.chat_async([{"role": "user", "content": "?"}])
    messages = [{"role": "user", "content": "how good?"}]
    reply = await judge.chat.completions.create(model=judge.model_path, messages=messages)
    (answer,) = await workflow.auxiliary_model_wrappers[0].chat_async(messages)
    assert answer.response_text == reply.choices[0].message.content
    exps = workflow.model.extract_experience_from_history()
    exps[0].reward = float(answer.response_text)
    return exps


@pytest.mark.parametrize("workflow", [OfAsyncClients, NamedLater, AsyncByDefault])
def test_asynchronous_clients(make_place: MakePlace, workflow: Any):
    rollout = make_place(lambda prompt: "0.5" if "how good" in prompt else "yes").one(workflow)
    assert (rollout.reward, rollout.error) == (0.5, None)


class Neither(Workflow):
    pass


class AsyncRun(Workflow):
    async def run(self):
        return []


class SyncRunAsync(Workflow):
    def run_async(self):
        return []


class Positional(Workflow):
    def __init__(self, task: Task, model: ModelWrapper, temperature: float) -> None:
        pass

    def run(self):
        return []


def test_without_agentscope_its_workflow_says_so():
    code = (
        "import sys; sys.modules['agentscope'] = None\n"
        "from sharpen.compat.trinity.react import AgentScopeReActAgent, BoxedResult\n"
        "AgentScopeReActAgent(openai_client=None, model_name='m', system_prompt='', generate_kwargs={}, "
        "response_structure=BoxedResult)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "AgentScope's agents need AgentScope 1.x (" in done.stderr
    assert "of agentscope." in done.stderr
    assert "pip install" in done.stderr


class Both(Workflow):
    """Both kinds; the older style says which."""

    @property
    def asynchronous(self) -> bool:
        return True

    def run(self):
        raise AssertionError("the other one is meant")

    async def run_async(self):
        exps = await self.model.chat_async([{"role": "user", "content": "?"}])
        exps[0].reward = 1.0
        return exps


def test_which_of_both_is_meant(make_place: MakePlace):
    assert make_place("yes").one(Both).reward == 1.0


@pytest.mark.parametrize(
    ("workflow", "taskset", "words"),
    [
        (Neither, {}, r"workflow Neither has neither run\(\) nor run_async\(\)"),
        (AsyncRun, {}, r"workflow AsyncRun: run\(\) is asynchronous; call it run_async\(\)"),
        (SyncRunAsync, {}, r"workflow SyncRunAsync: run_async\(\) is not asynchronous"),
        (Positional, {}, "workflow Positional cannot be constructed: missing a required argument: 'temperature'"),
        (dict, {}, "is not a subclass of sharpen.compat.trinity.Workflow"),
        ("math_workflw", {}, "there is no workflow 'math_workflw'; did you mean 'math_workflow'"),
        (Both, {"reward_fn": "math_rewrd"}, "there is no reward function 'math_rewrd'; did you mean 'math_reward'"),
        (Both, {"reward_fn": "json:dumps"}, "'json:dumps' is not a class"),
        (Both, {"rollout_args": {"temprature": 1}}, "rollout_args has no 'temprature'; did you mean 'temperature'"),
        (Both, {"rollout_args": {"n": 8}}, r"rollout_args.n is 8: a rollout is one run"),
    ],
)
def test_what_can_be_told_before_anything_runs(workflow: Any, taskset: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        workflow_function(workflow, TasksetConfig(**taskset), {})


def test_a_rollout_has_workflow_args_of_its_own(make_place: MakePlace):
    args = {"last": 0, "list": []}

    class Grows(Walk):
        def reward(self, exps: Any) -> float:
            self.task.workflow_args["list"].append(1)
            return float(len(self.task.workflow_args["list"]))

    group = make_place("yes").run(Grows, group_size=3, workflow_args=args)[0]
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0, 1.0]
    assert args == {"last": 0, "list": []}
    assert all(rollout.outcome == Outcome.OK for rollout in group.rollouts)
