"""Judges as AgentScope 1's users write them: on MetricBase, with its own output objects, failing on an empty answer."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
from agentscope.agent import ReActAgent
from agentscope.evaluate import MetricBase, MetricResult, MetricType
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel

from sharpen import JudgeOutput, WorkflowOutput
from sharpen.types import Outcome


async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    agent = ReActAgent(name="friday", sys_prompt="Solve it.", model=model, formatter=OpenAIChatFormatter())
    return WorkflowOutput(response=await agent.reply(Msg("user", task["question"], "user")))


TASK = {"question": "2+3", "answer": "5"}


class Contains(MetricBase):
    """Whether the true answer is in the text."""

    def __init__(self, truth: str) -> None:
        super().__init__(name="contains", metric_type=MetricType.NUMERICAL, description="answer in text")
        self.truth = truth

    async def __call__(self, text: str) -> MetricResult:
        return MetricResult(name=self.name, result=float(self.truth in text), message=text)


@pytest.mark.parametrize(("said", "reward"), [("it is 5", 1.0), ("it is 6", 0.0)])
def test_a_judge_on_metric_base(rollouts: Any, said: str, reward: float) -> None:
    async def judge(task: dict[str, Any], response: Msg) -> JudgeOutput:
        result = await Contains(task["answer"])(response.get_text_content() or "")
        return JudgeOutput(reward=float(result.result), metrics={result.name: result.result})

    (group,) = rollouts(said).run(workflow, judge, tasks=[TASK])
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, reward)
    assert rollout.metrics["judge/contains"] == reward


def test_a_judge_that_raises_on_an_empty_answer_is_a_failure_of_the_judge(rollouts: Any) -> None:
    """`truth in None`, as in the quick start of the tuner: excluded, never a reward; the others go on."""

    async def judge(task: dict[str, Any], response: Msg) -> JudgeOutput:
        return JudgeOutput(reward=1.0 if task["answer"] in response.get_text_content() else 0.0)

    empty = iter(["", "it is 5"])
    (group,) = rollouts(lambda prompt: next(empty)).run(workflow, judge, tasks=[TASK], group_size=2)
    outcomes = {rollout.outcome: rollout for rollout in group.rollouts}
    assert set(outcomes) == {Outcome.OK, Outcome.JUDGE_ERROR}
    assert outcomes[Outcome.OK].reward == 1.0
    assert outcomes[Outcome.JUDGE_ERROR].reward is None
    assert "TypeError" in (outcomes[Outcome.JUDGE_ERROR].error or "")


def test_the_quick_starts_judge_takes_none_for_empty(rollouts: Any) -> None:
    async def judge(task: dict[str, Any], response: Msg) -> JudgeOutput:
        answer = response.get_text_content() or ""
        return JudgeOutput(reward=1.0 if answer.strip() == task["answer"] else 0.0)

    (group,) = rollouts("").run(workflow, judge, tasks=[TASK])
    assert [rollout.reward for rollout in group.rollouts] == [0.0]


def test_agentscopes_own_output_objects(rollouts: Any, agentscope_tuner: ModuleType) -> None:
    theirs = importlib.import_module("agentscope.tuner._workflow"), importlib.import_module("agentscope.tuner._judge")

    async def their_workflow(task: dict[str, Any], model: OpenAIChatModel) -> Any:
        return theirs[0].WorkflowOutput(response=(await workflow(task, model)).response, metrics={"turns": 1.0})

    async def their_judge(task: dict[str, Any], response: Msg) -> Any:
        return theirs[1].JudgeOutput(reward=0.75, metrics={"style": 0.5})

    (group,) = rollouts("5").run(their_workflow, their_judge, tasks=[TASK])
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 0.75)
    assert {"turns": 1.0, "judge/style": 0.5}.items() <= rollout.metrics.items()


def test_a_workflow_of_the_oldest_form_returns_a_number(rollouts: Any) -> None:
    async def oldest(task: dict[str, Any], model: OpenAIChatModel) -> float:
        answer = (await workflow(task, model)).response
        return float(answer.get_text_content() == task["answer"])

    (group,) = rollouts("5").run(oldest, tasks=[TASK])
    assert [rollout.reward for rollout in group.rollouts] == [1.0]


def test_a_message_is_a_response_like_any_other(rollouts: Any) -> None:
    """Also one that the workflow makes itself."""

    async def fixed(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        return WorkflowOutput(response=Msg("friday", [TextBlock(type="text", text="5")], "assistant"))

    async def judge(task: dict[str, Any], response: Msg) -> JudgeOutput:
        return JudgeOutput(reward=float(response.get_text_content()))

    (group,) = rollouts("unused").run(fixed, judge, tasks=[TASK])
    assert [rollout.reward for rollout in group.rollouts] == [5.0]
