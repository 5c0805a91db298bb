"""`tune()` trains an Agent of AgentScope 2, which has no tuner of its own: the quickstart's model and tasks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit
from transformers import AutoTokenizer

from sharpen import AlgorithmConfig, DatasetConfig, JudgeOutput, TuneResult, TunerModelConfig, WorkflowOutput, tune
from sharpen.learning.experience.reading import read_groups
from sharpen.types import Outcome

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from quickstart.agent import MAX_CALLS, MAX_TOKENS, SYSTEM, TOOLS, last_number  # noqa: E402
from quickstart.agent import calculator as work_out  # noqa: E402

MODEL = EXAMPLES / "quickstart" / "model"


def calculator(expression: str) -> str:
    """The value of an arithmetic expression, or what was wrong with it."""
    return work_out(json.dumps({"expression": expression}))


async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    schema = TOOLS[0]["function"]  # the exact one that the model was taught
    tool = FunctionTool(calculator, description=schema["description"], input_schema=schema["parameters"])
    agent = Agent(
        name="solver",
        system_prompt=SYSTEM,
        model=model,
        toolkit=Toolkit(tools=[tool]),
        state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS)),
        react_config=ReActConfig(max_iters=MAX_CALLS),
        injection_config=InjectionConfig(inject_runtime_state=False),
    )
    answer = await agent.reply(UserMsg(name="user", content=task["question"]))
    return WorkflowOutput(response=answer.get_text_content())


async def judge(task: dict[str, Any], response: str | None) -> JudgeOutput:
    return JudgeOutput(reward=float(last_number(response) == last_number(task["answer"])))


def train(folder: Path, steps: int, **algorithm: Any) -> TuneResult:
    data = str(EXAMPLES / "quickstart" / "data")
    return tune(
        workflow_func=workflow,
        judge_func=judge,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=TunerModelConfig(model_path=str(MODEL), max_model_len=512, max_tokens=MAX_TOKENS),
        algorithm=AlgorithmConfig(algorithm_type="grpo", learning_rate=3e-4, **algorithm),
        settings={
            "checkpoint_root_dir": str(folder),
            "loss.kl": "none",
            "trainer": {"beta2": 0.95, "weight_decay": 0.0},
            "evaluation.max_tasks": 16 if steps < 3 else 256,
        },
    )


def test_two_steps(tmp_path: Path) -> None:
    result = train(tmp_path, steps=2, group_size=4, batch_size=4)
    rollouts = [rollout for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts]
    assert len(rollouts) == 32
    assert {rollout.outcome for rollout in rollouts} <= {Outcome.OK, Outcome.CONTEXT_OVERFLOW}
    assert any(call.parent == 0 for rollout in rollouts for call in rollout.calls), "a tool round is one sequence"
    assert (result.model_dir / "model.safetensors").exists()


def test_prompts_are_the_ones_that_the_model_was_taught(tmp_path: Path) -> None:
    """Token by token what transformers makes of the system prompt, the question and the quickstart's tool."""
    result = train(tmp_path, steps=1, group_size=2, batch_size=2)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    firsts = [r.calls[0] for group in read_groups(result.run_dir / "run.db") for r in group.rollouts if r.calls]
    assert firsts
    for call in firsts:
        question = call.messages[-1]["content"]
        if not isinstance(question, str):
            (block,) = question
            question = block["text"]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(call.prompt_ids_P) == text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns(tmp_path: Path) -> None:
    """As the quickstart does in 40 steps; fewer here, to keep the time."""
    result = train(tmp_path, steps=16, group_size=8, batch_size=16)
    assert result.before["greedy"].accuracy < 0.5
    assert result.after["greedy"].accuracy >= 0.9
