"""Trinity's agents that do mathematics with Python as their tool: AgentScope's `ReActAgent` with `execute_python_code`.

In: a task with a question and a truth. Out: the experiences of all the agent's calls, with the reward of its answer and
the metric `react_memory_length`. The code that the model writes is run on this machine, in a process of its own.
"""

from __future__ import annotations

from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.react import (
    GSM8K_PROMPT,
    BoxedResult,
    agentscope,
    react_agent,
    said,
    sampling_of,
    user_message,
)
from sharpen.compat.trinity.rewards import MathBoxedRewardFn, truth_in
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import Workflow
from sharpen.compat.trinity.workflows.python_tool import execute_python_code


class AgentScopeReactMathWorkflow(Workflow):
    """The answer is the agent's structured `result`, scored by its box."""

    is_async = True
    max_iters = 10

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.query = task.raw_task[task.format_args.prompt_key]
        self.truth = truth_in(task.truth)
        self.reward_fn = MathBoxedRewardFn()
        toolkit = agentscope("tool", "Toolkit")()
        toolkit.register_tool_function(execute_python_code)
        self.agent = react_agent(
            "math_react_agent",
            GSM8K_PROMPT,
            client=model.get_openai_async_client(),
            model_name=model.model_path,
            sampling=sampling_of(task),
            toolkit=toolkit,
            max_iters=self.max_iters,
        )

    async def run_async(self) -> list[Experience]:
        """Solve, score, and give every call of the agent the reward."""
        answer = await self.answer(user_message(self.query))
        reward = sum(self.reward_fn(response=said(answer), truth=self.truth).values())
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = reward
            experience.metrics["react_memory_length"] = len(self.agent.memory.content)
        return experiences

    async def answer(self, question: Any) -> Any:
        """The agent's message."""
        return await self.agent.reply(question, structured_model=BoxedResult)


class AgentScopeV0ReactMathWorkflow(AgentScopeReactMathWorkflow):
    """As written for AgentScope 0.x: at most five rounds, and the answer is the text that the agent ends with.

    The agent is that of AgentScope 1.x.
    """

    max_iters = 5

    async def answer(self, question: Any) -> Any:
        """The agent's message."""
        return await self.agent.reply(question)
