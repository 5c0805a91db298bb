"""Trinity's ReAct workflow with AgentScope 1's real agent, and AgentScope's objects beside a Trinity workflow."""

from __future__ import annotations

from typing import Any

import pytest
from agent_scripts import call, turns
from agentscope.model import OpenAIChatModel

from sharpen.compat.trinity import Workflow, workflow_function
from sharpen.compat.trinity.task import TasksetConfig
from sharpen.errors import ConfigError
from sharpen.types import CallStatus, Outcome

GSM8K = TasksetConfig(prompt_key="question", response_key="answer")
ROW = {"question": "What is 6 times 7?", "answer": "6*7=<<6*7=42>>42\n#### 42"}


def boxed(number: int) -> str:
    return call("generate_response", f'{{"response": "x", "result": "It is \\\\boxed{{{number}}}."}}')


@pytest.mark.parametrize("name", ["as_react_workflow", "agentscope_react_workflow"])
def test_the_react_workflow_scores_the_structured_answer(rollouts: Any, name: str) -> None:
    function = workflow_function(name, GSM8K, {"type": "gsm8k"})
    (group,) = rollouts(turns(boxed(42), "It is 42.")).run(function, tasks=[ROW], group_size=2)
    for rollout in group.rollouts:
        assert (rollout.outcome, rollout.error) == (Outcome.OK, None)
        assert (rollout.reward, rollout.metrics["accuracy"], rollout.metrics["format_score"]) == (1.0, 1.0, 0.0)
        assert dict(rollout.call_rewards) == {each.index: 1.0 for each in rollout.calls}
        assert all(each.status == CallStatus.USED for each in rollout.calls)
    (group,) = rollouts(turns(boxed(41), "It is 41.")).run(function, tasks=[ROW])
    assert group.rollouts[0].reward == 0.0


def test_unknown_task_types_are_refused(rollouts: Any) -> None:
    with pytest.raises(ConfigError, match=r"workflow_args\.type is 'chess'"):
        rollouts("x").run(workflow_function("as_react_workflow", GSM8K, {"type": "chess"}), tasks=[ROW])


class OwnModel(Workflow):
    """An AgentScope model of the user's, whose client is replaced."""

    async def run_async(self) -> Any:
        model = OpenAIChatModel(model_name=self.model.model_path, api_key="EMPTY", stream=False)
        model.client = self.model.get_openai_async_client()
        response = await model([{"role": "user", "content": self.task.task_desc}])
        exps = self.model.extract_experience_from_history()
        for exp in exps:
            exp.reward = float(response.content[0]["text"] == "yes")
        return exps


def test_a_model_whose_client_is_replaced(rollouts: Any) -> None:
    (group,) = rollouts("yes").run(workflow_function(OwnModel, GSM8K, {}), tasks=[ROW])
    (rollout,) = group.rollouts
    assert (rollout.error, rollout.reward, dict(rollout.call_rewards)) == (None, 1.0, {0: 1.0})
