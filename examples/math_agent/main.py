"""Tune AgentScope's ReActAgent to solve math problems: GSM8K, or small local tasks in its layout.

Role: a complete program in the form of AgentScope's tuner: a workflow, a judge, `tune()`. In: by default the
quickstart's model (2M parameters, on a CPU) and local tasks; with `--model` and `--data` real ones. Out: a run
directory under `checkpoints/MathAgent/`.

    python main.py                                              # minutes, on two CPU cores, nothing is downloaded
    python main.py --model Qwen/Qwen3-0.6B --data openai/gsm8k  # the real thing, on a GPU
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse

from sharpen import AlgorithmConfig, DatasetConfig, JudgeOutput, TuneResult, TunerModelConfig, WorkflowOutput, tune
from sharpen.compat.trinity.rewards import MathBoxedRewardFn

EXAMPLES = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(EXAMPLES))

from math_agent.gsm8k import write_data  # noqa: E402
from quickstart.agent import MAX_CALLS, MAX_TOKENS, SYSTEM, TOOLS, last_number  # noqa: E402
from quickstart.agent import calculator as work_out  # noqa: E402

BOXED_SYSTEM = (
    "You solve math problems. Think step by step, use the calculator for every computation, "
    "and put the final answer within \\boxed{}."
)


def calculator(expression: str) -> ToolResponse:
    """The tool: the value of an arithmetic expression, or what was wrong with it, as text."""
    return ToolResponse(content=[TextBlock(type="text", text=work_out(json.dumps({"expression": expression})))])


async def solve(model: OpenAIChatModel, sys_prompt: str, question: str, max_iters: int = 10) -> Msg:
    """The agent, as anyone writes it in AgentScope: it knows nothing of training."""
    toolkit = Toolkit()
    # Without json_schema AgentScope makes one from the signature; the quickstart's model was taught this exact one.
    toolkit.register_tool_function(calculator, json_schema=TOOLS[0])
    agent = ReActAgent(
        name="react_agent",
        sys_prompt=sys_prompt,
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        max_iters=max_iters,
    )
    return await agent.reply(Msg("user", question, role="user"))


async def run_react_agent(
    task: dict[str, Any], model: OpenAIChatModel, auxiliary_models: dict[str, OpenAIChatModel] | None = None
) -> WorkflowOutput:
    """The workflow for the quickstart's model, which ends its answers in '#### 42'."""
    return WorkflowOutput(response=await solve(model, SYSTEM, task["question"], MAX_CALLS))


async def run_boxed_agent(
    task: dict[str, Any], model: OpenAIChatModel, auxiliary_models: dict[str, OpenAIChatModel] | None = None
) -> WorkflowOutput:
    """The workflow for real models, which put their answers in a box."""
    return WorkflowOutput(response=await solve(model, BOXED_SYSTEM, task["question"]))


async def judge_number(task: dict[str, Any], response: Msg) -> JudgeOutput:
    """Reward 1 for the right number after '####', else 0."""
    return JudgeOutput(reward=float(last_number(response.get_text_content()) == last_number(task["answer"])))


async def judge_boxed(task: dict[str, Any], response: Msg) -> JudgeOutput:
    """Reward 1 if the number in the box is the one after '####' in the task's answer, else 0."""
    scores = MathBoxedRewardFn()(response=response.get_text_content(), truth=task["answer"])
    return JudgeOutput(reward=sum(scores.values()), metrics=scores)


async def run_and_judge(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    """Workflow and judge in one, for `sharpen run --config config.yaml`: Trinity's files know no judges."""
    output = await run_react_agent(task, model)
    return WorkflowOutput(reward=(await judge_number(task, output.response)).reward)


def main(argv: list[str] | None = None) -> TuneResult:
    """Train on the local tasks, or on what the command line names."""
    parser = argparse.ArgumentParser(description="Tune AgentScope's ReActAgent to solve math problems.")
    parser.add_argument("--model", help="folder or hub name of a real model (default: the quickstart's, 2M parameters)")
    parser.add_argument("--data", help="dataset in GSM8K's layout (default: local tasks, written on first use)")
    parser.add_argument("--steps", type=int, help="training steps (default: 40, or one epoch for a real model)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    data = arguments.data or str(write_data())
    if arguments.model is None:
        return tune_quickstart_model(data, 40 if arguments.steps is None else arguments.steps, arguments.seed)
    return tune_real_model(arguments.model, data, arguments.steps, arguments.seed)


def tune_quickstart_model(data: str, steps: int, seed: int) -> TuneResult:
    """The quickstart's model and recipe: 16 tasks x 8 rollouts a step, on a CPU."""
    return tune(
        workflow_func=run_react_agent,
        judge_func=judge_number,
        train_dataset=DatasetConfig(path=data, name="main", split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=data, name="main", split="test"),
        model=TunerModelConfig(
            model_path=str(EXAMPLES / "quickstart" / "model"), max_model_len=512, max_tokens=MAX_TOKENS
        ),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=8, batch_size=16, learning_rate=3e-4),
        project_name="MathAgent",
        settings={"seed": seed, "loss": {"kl": "none"}, "trainer": {"beta2": 0.95, "weight_decay": 0.0}},
    )


def tune_real_model(model: str, data: str, steps: int | None, seed: int) -> TuneResult:
    """A real model: the sizes and the learning rate of AgentScope's own example."""
    MathBoxedRewardFn()  # without its package it says so here, not in every rollout
    return tune(
        workflow_func=run_boxed_agent,
        judge_func=judge_boxed,
        train_dataset=DatasetConfig(path=data, name="main", split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=data, name="main", split="test"),
        model=TunerModelConfig(model_path=model, max_model_len=16384, max_tokens=2048),
        algorithm=AlgorithmConfig(
            algorithm_type="multi_step_grpo", group_size=8, batch_size=32, learning_rate=1e-6, eval_interval_steps=50
        ),
        project_name="MathAgent",
        settings={"seed": seed},
    )


if __name__ == "__main__":
    main()
