from typing import Dict

from sharpen import tune, WorkflowOutput, JudgeOutput, Dataset
from sharpen import TrinityChatModel
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg


async def run_react_agent(
    task: Dict,
    model: TrinityChatModel,
    auxiliary_models: Dict[str, TrinityChatModel],
) -> WorkflowOutput:
    agent = ReActAgent(
        name="react_agent",
        sys_prompt="You are a helpful math problem solving agent.",
        model=model,  # directly use the trainable model here
        formatter=OpenAIChatFormatter(),
    )

    response = await agent.reply(
        msg=Msg("user", task["question"], role="user"),  # extract question from task
    )

    return WorkflowOutput(
        response=response,
    )


async def judge_function(
    task: Dict, response: Msg, auxiliary_models: Dict[str, TrinityChatModel]
) -> JudgeOutput:
    """Simple reward: 1.0 for exact match, else 0.0."""
    truth = task["answer"]
    answer = response.get_text_content() or ""
    return JudgeOutput(reward=1.0 if answer.strip() == truth.strip() else 0.0)


if __name__ == "__main__":
    dataset = Dataset(path="my_dataset", split="train")
    tune(
        workflow_func=run_react_agent,
        judge_func=judge_function,
        train_dataset=dataset,
        config_path="config.yaml",
    )
