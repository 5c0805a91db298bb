"""AgentScope's tuner samples by their facts: the same calls, arguments and keys, with tasks and prompts of our own,
real agents and a small model. Each loads with its numbers of engines and its file as they are, and trains two steps.

Prompt tuning and model selection have their own tests (tests/beyond/prompt_tune, tests/beyond/model_selection).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from agentscope.agent import AgentBase, ReActAgent
from agentscope.formatter import OpenAIChatFormatter, OpenAIMultiAgentFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase, OpenAIChatModel
from agentscope.pipeline import MsgHub, fanout_pipeline
from agentscope.tool import Toolkit, ToolResponse
from pydantic import BaseModel

from sharpen import TuneResult
from sharpen.compat.agentscope.tuner import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    TunerModelConfig,
    WorkflowOutput,
    tune,
)
from sharpen.compat.trinity import MathBoxedRewardFn
from sharpen.errors import ConfigError
from sharpen.learning.experience.reading import read_groups

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
TOY = {"evaluation.max_tasks": 2, "check.enabled": False}

Printed = Callable[[], str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.delenv("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", raising=False)
    return lambda: capsys.readouterr().out


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample's folder, which is the working directory; what it calls `Qwen/...` is the quickstart's model there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRINITY_MODEL_PATH", raising=False)
    return tmp_path


def put_model(folder: Path, name: str) -> str:
    shutil.copytree(QUICKSTART, folder / name)
    config = folder / name / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 65536}))
    return name


def put_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check_trained(result: TuneResult, num_rollouts: int) -> None:
    """Two steps, and every rollout of them recorded as it ended."""
    assert result.steps == 2
    rollouts = [rollout for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts]
    assert [rollout.outcome.value for rollout in rollouts] == ["ok"] * num_rollouts, [one.error for one in rollouts]
    assert all(rollout.calls for rollout in rollouts)


async def solve(
    task: dict[str, Any], model: OpenAIChatModel, auxiliary_models: dict[str, OpenAIChatModel] | None = None
) -> WorkflowOutput:
    """math_agent, model_tuning, data_augment: an agent with the meta tool answers a question."""
    assert not auxiliary_models
    agent = ReActAgent(
        name="solver", sys_prompt="Box it.", model=model, enable_meta_tool=True, formatter=OpenAIChatFormatter()
    )
    return WorkflowOutput(response=await agent.reply(msg=Msg("user", task["question"], role="user")))


async def judge_boxed(
    task: dict[str, Any], response: Msg, auxiliary_models: dict[str, OpenAIChatModel] | None = None
) -> JudgeOutput:
    assert not auxiliary_models
    truth = task["answer"].split("####")[1].strip()
    found = MathBoxedRewardFn()(response=response.get_text_content(), truth=truth)
    return JudgeOutput(reward=sum(found.values()), metrics=found)


SUMS = [{"question": f"{n} + 3?", "answer": f"#### {n + 3}", "easy": n / 40, "hard": n / 80} for n in range(40)]


@pytest.mark.parametrize("sample", ["math_agent", "model_tuning"])
def test_math_agent(place: Path, printed: Printed, sample: str) -> None:
    """Neither gives a file; both ask for four engines. Red where that is refused on one machine."""
    put_rows(place / "gsm8k" / "train.jsonl", SUMS)
    result = tune(
        workflow_func=solve,
        judge_func=judge_boxed,
        train_dataset=DatasetConfig(path="gsm8k", split="train", total_steps=2),
        model=TunerModelConfig(
            model_path=put_model(place, "Qwen/Qwen3-0.6B"),
            max_model_len=24576,
            max_tokens=16,
            temperature=1.0,
            inference_engine_num=4,
            tensor_parallel_size=1,
        ),
        algorithm=AlgorithmConfig(algorithm_type="multi_step_grpo", group_size=2, learning_rate=1e-6, batch_size=2),
        settings=TOY,
    )
    assert result.run_dir.parent == place / "checkpoints" / "AgentScope"
    assert "inference_engine_num = 4: without effect" in printed()
    check_trained(result, 8)


RANDOM = """
project: Data-Augmentation
name: Random-Selector
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
buffer:
  total_epochs: 1
  explorer_input:
    taskset: {path: augmented, split: train, task_selector: {selector_type: random}}
    eval_tasksets: [{name: eval-aime24, path: aime24, split: test}]
synchronizer: {sync_style: dynamic_by_explorer, sync_method: 'nccl', sync_interval: 4, sync_timeout: 7200}
monitor: {monitor_type: tensorboard}
algorithm: {algorithm_type: multi_step_grpo, repeat_times: 8, optimizer: {lr: 1e-6}}
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen3-0.6B}
  max_model_len: 24576
  max_response_tokens: 16384
  temperature: 1.0
cluster: {node_num: 1, gpu_per_node: 8}
explorer:
  eval_interval: 20
  runner_per_model: 16
  max_timeout: 1200
  rollout_model: {engine_num: 4, tensor_parallel_size: 1, enable_openai_api: true, enable_history: true,
    enable_auto_tool_choice: true, tool_call_parser: hermes, reasoning_parser: deepseek_r1}
trainer: {save_interval: 100, use_dynamic_bsz: true, ulysses_sequence_parallel_size: 1}
"""
BY_DIFFICULTY = RANDOM.replace(
    "task_selector: {selector_type: random}",
    "task_selector: {selector_type: difficulty_based, feature_keys: [easy, hard], kwargs: {m: 8, lamb: 0.1, rho: 0.1, "
    "target_reward: 0.8, tau: 0, do_sample: true}}",
).replace("Random-", "Difficulty-Based-") + (
    "data_processor: {experience_pipeline: {operators: [{name: pass_rate_calculator}]}}\n"
)


@pytest.mark.parametrize(
    ("content", "name"), [(RANDOM, "Random-Selector"), (BY_DIFFICULTY, "Difficulty-Based-Selector")]
)
def test_data_augment(place: Path, content: str, name: str) -> None:
    """The data are the file's alone; both selectors, with `tau: 0` and the pass rates that come back to the tasks."""
    put_rows(place / "augmented" / "train.jsonl", SUMS)
    put_rows(place / "aime24" / "test.jsonl", SUMS[:4])
    (place / "config.yaml").write_text(content)
    result = tune(
        workflow_func=solve,
        judge_func=judge_boxed,
        config_path="config.yaml",
        model=TunerModelConfig(
            model_path=put_model(place, "Qwen/Qwen3-0.6B"),
            max_model_len=24576,
            max_tokens=16,
            temperature=1.0,
            inference_engine_num=4,
        ),
        algorithm=AlgorithmConfig(group_size=2, learning_rate=1e-6, eval_interval_steps=20, batch_size=2),
        settings={**TOY, "train_dataset.total_steps": 2},
    )
    assert result.run_dir == place / "checkpoints" / "Data-Augmentation" / name
    assert set(result.rewards_before.greedy) == {"test/0", "test/1"}
    check_trained(result, 8)


LAKE = """
project: "AgentScope"
name: "FrozenLake"
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 16
  kl_loss_fn: "low_var_kl"
  kl_loss_fn_args: {kl_coef: 0}
  advantage_fn_args: {epsilon: 1e-6, std_threshold: 0.0001}
  optimizer: {lr: 1e-6}
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-3B-Instruct}
  max_prompt_tokens: 23552
  max_response_tokens: 2048
  max_model_len: 25600
  temperature: 1.0
buffer:
  total_epochs: 5
  batch_size: 32
  train_batch_size: 1024
  trainer_input:
    experience_buffer:
      name: experience_buffer
      storage_type: queue
      max_read_timeout: 7200
      replay_buffer: {enable: true, priority_fn: linear_decay, priority_fn_args: {decay: 0.1}}
explorer:
  runner_per_model: 16
  rollout_model: {engine_num: 6, tensor_parallel_size: 1, enable_openai_api: true, enable_history: true,
    enable_auto_tool_choice: true, tool_call_parser: hermes}
trainer: {save_interval: 100, use_dynamic_bsz: true, grad_clip: 1.0, max_token_len_per_gpu: 25600,
  ulysses_sequence_parallel_size: 2}
synchronizer: {sync_style: dynamic_by_explorer, sync_interval: 1, sync_timeout: 1200}
"""


class Walker(ReActAgent):
    """An agent of one step, asked again with what it sees."""

    def __init__(self, model: ChatModelBase) -> None:
        super().__init__(name="walker", model=model, sys_prompt="Walk.", formatter=OpenAIChatFormatter(), max_iters=1)


async def walk(
    task: dict[str, Any], model: ChatModelBase, auxiliary_models: dict[str, ChatModelBase]
) -> WorkflowOutput:
    """frozen_lake: an environment and an agent in turns; the workflow gives the reward."""
    assert len(auxiliary_models) == 0
    arguments = task.get("workflow_args", {}) or task
    agent, place, rewards = Walker(model), 0, []
    for turn in range(arguments.get("agent_max_steps", 3)):
        said = await agent.reply(msg=Msg("user", f"Step {turn}: you are at {place} of {task['size']}.", role="user"))
        place += len(said.get_text_content() or "") % 2
        rewards.append(float(place >= task["size"]))
    return WorkflowOutput(
        reward=sum(rewards), response=Msg("assistant", str(place), role="assistant"), metrics={"env_steps": 3.0}
    )


def test_frozen_lake(place: Path) -> None:
    put_rows(place / "lake" / "train.jsonl", [{"size": 1 + n % 3, "p": 0.7, "seed": n} for n in range(40)])
    (place / "config.yaml").write_text(LAKE)
    result = tune(
        workflow_func=walk,
        model=TunerModelConfig(
            model_path=put_model(place, "Qwen/Qwen2.5-3B-Instruct"),
            max_model_len=25600,
            max_tokens=8,
            inference_engine_num=6,
            reasoning_parser=None,
        ),
        train_dataset=DatasetConfig(path="lake", split="train", total_steps=2),
        algorithm=AlgorithmConfig(algorithm_type="multi_step_grpo", group_size=4, batch_size=2, learning_rate=1e-6),
        config_path=str(place / "config.yaml"),
        settings=TOY,
    )
    assert result.run_dir == place / "checkpoints" / "AgentScope" / "FrozenLake"
    check_trained(result, 16)


ASK = """
project: AgentScope-ReAct
name: Learn_to_Ask
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm: {algorithm_type: grpo}
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-7B-Instruct}
  tinker: {enable: false}
cluster: {node_num: 1, gpu_per_node: 8}
buffer: {total_epochs: 4}
explorer: {runner_per_model: 32, max_timeout: 600}
synchronizer: {sync_style: fixed, sync_method: 'nccl', sync_interval: 10, sync_timeout: 7200}
trainer: {save_interval: 90, use_dynamic_bsz: true, ulysses_sequence_parallel_size: 1}
monitor: {monitor_type: wandb}
"""


async def ask(
    task: dict[str, Any], model: OpenAIChatModel, auxiliary_models: dict[str, OpenAIChatModel]
) -> WorkflowOutput:
    """learn_to_ask: an agent of one step with a memory, given a conversation."""
    assert len(auxiliary_models) == 1
    agent = ReActAgent(
        name="doctor",
        sys_prompt="Ask.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=None,
        memory=InMemoryMemory(),
        max_iters=1,
    )
    said = [Msg(name=one["role"], content=one["content"], role=one["role"]) for one in task["messages"]]
    return WorkflowOutput(response=await agent.reply(said))


async def judge_question(
    task: dict[str, Any], response: Msg, auxiliary_models: dict[str, OpenAIChatModel]
) -> JudgeOutput:
    """The auxiliary model is called as AgentScope's own object, with plain messages."""
    said = response.get_text_content() or ""
    messages = [{"role": "system", "content": "Rate it."}, {"role": "user", "content": said[:40] or "nothing"}]
    found = await auxiliary_models["auxiliary_model"](messages)
    rated = Msg(name="assistant", content=list(found.content), role="assistant").get_text_content() or ""
    return JudgeOutput(reward=float(len(said) % 3), metrics={"rated": float(len(rated))})


@pytest.mark.skipif(find_spec("wandb") is not None, reason="the sample asks for W&B, whose absence is said")
def test_learn_to_ask(place: Path, printed: Printed) -> None:
    """Its file asks for W&B, its auxiliary model for two GPUs; ten steps pass between two syncs."""
    rows = [{"messages": [{"role": "user", "content": f"It hurts for {n} days."}]} for n in range(40)]
    put_rows(place / "data" / "train.jsonl", rows)
    (place / "config.yaml").write_text(ASK)
    auxiliary = TunerModelConfig(
        model_path=put_model(place, "Qwen/Qwen2.5-32B-Instruct"),
        max_model_len=8192,
        max_tokens=8,
        temperature=0.7,
        tensor_parallel_size=2,
        inference_engine_num=1,
        reasoning_parser=None,
    )
    given = {
        "workflow_func": ask,
        "judge_func": judge_question,
        "train_dataset": DatasetConfig(path=str(place / "data"), split="train", total_epochs=4, total_steps=2),
        "model": TunerModelConfig(
            model_path=put_model(place, "Qwen/Qwen2.5-7B-Instruct"),
            max_model_len=8192,
            max_tokens=8,
            inference_engine_num=4,
            reasoning_parser=None,
        ),
        "auxiliary_models": {"auxiliary_model": auxiliary},
        "algorithm": AlgorithmConfig(algorithm_type="grpo", group_size=2, learning_rate=5.0e-07, batch_size=2),
        "config_path": "config.yaml",
        "settings": TOY,
    }
    with pytest.raises(ConfigError, match="'wandb' needs the package wandb") as raised:
        tune(**given)
    assert "problems" not in str(raised.value)  # nothing else is in the way
    result = tune(**given, monitor_type="tensorboard")
    assert "auxiliary_models.auxiliary_model: tensor_parallel_size = 2: without effect" in printed()
    assert result.run_dir == place / "checkpoints" / "AgentScope-ReAct" / "Learn_to_Ask"
    check_trained(result, 8)


SEARCH = """
project: "AgentScope"
name: "Email_search"
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 8
  optimizer: {lr: 1e-6}
  policy_loss_fn: "rec"
  policy_loss_fn_args: {epsilon_low: 0.2, epsilon_high: 0.2, clip_mode: "one-side", weight: "none", temp: 1.0,
    regularizer: "none", regularizer_coef: 0.0}
  kl_loss_fn: 'k2'
  kl_loss_fn_args: {kl_coef: 0.0}
  advantage_fn_args: {std_cal_level: 'batch'}
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen3-4B-Instruct-2507}
  max_response_tokens: 4096
  max_model_len: 20480
buffer:
  total_epochs: 10
  batch_size: 64
  train_batch_size: 2560
  trainer_input:
    experience_buffer:
      name: experience_buffer
      storage_type: queue
      replay_buffer: {enable: true, priority_fn: 'decay_limit_randomization',
        priority_fn_args: {decay: 2.0, use_count_limit: 3, sigma: 2.0}}
explorer:
  eval_interval: 10
  max_repeat_times_per_runner: 1
  max_timeout: 3600
  rollout_model: {enable_history: true, enable_openai_api: true, enable_auto_tool_choice: true,
    tool_call_parser: hermes, engine_num: 4, tensor_parallel_size: 1, enable_prefix_caching: false}
  auxiliary_models:
    - {name: judge, model_path: Qwen/Qwen3-30B-A3B-Instruct-2507, engine_num: 1, tensor_parallel_size: 2,
       enable_thinking: false, max_prompt_tokens: 2048, max_response_tokens: 128, max_model_len: 2500}
synchronizer: {sync_style: dynamic_by_explorer, sync_interval: 5, sync_timeout: 3600}
trainer: {save_interval: 100, grad_clip: 1.0, use_dynamic_bsz: true, max_token_len_per_gpu: 16384,
  ulysses_sequence_parallel_size: 1}
"""


class Answer(BaseModel):
    """What the agent ends with."""

    answer: str
    sources: list[str]


def without_choice(_self: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments.pop("tool_choice", None)
    return arguments


class Searcher(ReActAgent):
    """An agent with tools of its own and a hook before each step."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.found: list[str] = []
        toolkit = Toolkit()
        toolkit.register_tool_function(self.search)
        super().__init__(*args, toolkit=toolkit, **named)
        self.register_instance_hook("pre_reasoning", "no_choice", without_choice)

    def search(self, words: list[str]) -> ToolResponse:
        """Search the mails.

        Args:
            words: what to look for.
        """
        self.found += words
        return ToolResponse(content=[TextBlock(type="text", text=json.dumps(words))])


async def search(
    task: dict[str, Any], model: ChatModelBase, auxiliary_models: dict[str, ChatModelBase]
) -> WorkflowOutput:
    """email_search: a structured answer, whose metadata the judge reads."""
    assert len(auxiliary_models) > 0
    most = int(task.get("workflow_args", {}).get("max_turns", 2))
    agent = Searcher(
        name="searcher", sys_prompt="Search.", model=model, formatter=OpenAIChatFormatter(), max_iters=most
    )
    await agent.memory.clear()
    response = await agent.reply(msg=Msg("user", task["question"], role="user"), structured_model=Answer)
    response.metadata = {**(response.metadata or {}), "found": agent.found, "turns": most}
    return WorkflowOutput(response=response)


async def judge_answer(task: dict[str, Any], response: Msg, auxiliary_models: dict[str, ChatModelBase]) -> JudgeOutput:
    judge = auxiliary_models.get("judge") or next(iter(auxiliary_models.values()))
    found = await judge([{"role": "user", "content": task["answer"]}])
    text = "".join(str(block.get("text", "")) for block in found.content if block.get("type") == "text")
    reward = {"accuracy": -1.0, "format": float(len(text) % 2) / 10}
    return JudgeOutput(reward=sum(reward.values()), metrics={**reward, "actual_turns": response.metadata["turns"]})


def test_email_search(place: Path) -> None:
    put_rows(place / "mails" / "train.jsonl", [{"question": f"When is {n}?", "answer": "Monday"} for n in range(40)])
    (place / "config.yaml").write_text(SEARCH)
    judge = TunerModelConfig(
        model_path=put_model(place, "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        max_model_len=2500,
        max_tokens=8,
        inference_engine_num=1,
        tensor_parallel_size=2,
        tool_call_parser=None,
        reasoning_parser=None,
    )
    result = tune(
        workflow_func=search,
        judge_func=judge_answer,
        train_dataset=DatasetConfig(path="mails", split="train", total_steps=2),
        model=TunerModelConfig(
            model_path=put_model(place, "Qwen/Qwen3-4B-Instruct-2507"),
            max_model_len=20480,
            max_tokens=8,
            inference_engine_num=4,
            reasoning_parser=None,
        ),
        auxiliary_models={"judge": judge},
        algorithm=AlgorithmConfig(algorithm_type="multi_step_grpo", group_size=2, batch_size=2, learning_rate=1e-6),
        config_path=str(place / "config.yaml"),
        settings=TOY,
    )
    assert result.run_dir == place / "checkpoints" / "AgentScope" / "Email_search"
    check_trained(result, 8)


WOLVES = """
project: AgentScope-Werewolves
name: Werewolves-7Player-GRPO
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm:
  algorithm_type: multi_step_grpo
  kl_loss_fn: "low_var_kl"
  kl_loss_fn_args: {kl_coef: 0}
  advantage_fn_args: {epsilon: 1e-6, step_norm: true}
  repeat_times: 32
  policy_loss_fn_args: {clip_range_low: 0.2, clip_range_high: 0.28}
  optimizer: {lr: 1e-6}
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-7B-Instruct}
  max_response_tokens: 4096
  max_model_len: 25600
cluster: {node_num: 4, gpu_per_node: 8, ray_address: auto}
buffer:
  total_steps: 400
  batch_size: 24
  train_batch_size: 2048
  explorer_input:
    taskset:
      name: werewolves
      storage_type: file
      path: data
      split: 'train'
      rollout_args: {temperature: 1.0, max_tokens: 4096}
      workflow_args: {trainable_target: good_guy}
    eval_tasksets: []
  trainer_input:
    experience_buffer: {name: werewolves, storage_type: queue, max_read_timeout: 7200, replay_buffer: {enable: true}}
explorer:
  runner_per_model: 16
  max_timeout: 3600
  max_retry_times: 0
  max_repeat_times_per_runner: 1
  over_rollout: {ratio: 0.2, wait_after_min: 15}
  dynamic_timeout: {enable: true, ratio: 4}
  rollout_model: {engine_num: 16, tensor_parallel_size: 1, enable_prefix_caching: false, enforce_eager: false,
    enable_openai_api: true, enable_history: true, enable_auto_tool_choice: true, tool_call_parser: hermes,
    dtype: bfloat16, seed: 42}
  auxiliary_models:
    - {name: participant, model_path: Qwen/Qwen3-30B-A3B-Instruct-2507, engine_num: 8, tensor_parallel_size: 1,
       enable_prefix_caching: false, enforce_eager: false, enable_openai_api: true, enable_auto_tool_choice: true,
       tool_call_parser: hermes, dtype: bfloat16, seed: 42}
synchronizer: {sync_style: dynamic_by_explorer, sync_method: 'nccl', sync_interval: 1, sync_timeout: 72000}
trainer: {save_interval: 100, grad_clip: 1.0, use_dynamic_bsz: true, max_token_len_per_gpu: 16384,
  ulysses_sequence_parallel_size: 2}
monitor: {monitor_type: wandb}
"""


class Moderator(AgentBase):
    """Says what it is told to, and prints it."""

    async def reply(self, content: str) -> Msg:
        said = Msg("moderator", content, role="assistant")
        await self.print(said)
        return said


moderator = Moderator()


class Vote(BaseModel):
    """Who is out."""

    vote: str


async def play(
    task: dict[str, Any], model: TunerModelConfig, auxiliary_models: dict[str, TunerModelConfig]
) -> WorkflowOutput:
    """werewolves: players of both models in one hub; which side is trained comes with the task; a metric is a word."""
    target = task.get("workflow_args", {}).get("trainable_target", "werewolf")
    players = [
        ReActAgent(
            name=f"Player{number}",
            sys_prompt="Play.",
            model=model if (role == "werewolf") == (target == "werewolf") else auxiliary_models["participant"],
            formatter=OpenAIMultiAgentFormatter(),
            max_iters=1,
        )
        for number, role in enumerate(["werewolf", "villager", "seer"])
    ]
    async with MsgHub(participants=players) as hub:
        await hub.broadcast(await moderator("Night falls."))
        hub.set_auto_broadcast(False)
        votes = await fanout_pipeline(players, msg=await moderator("Vote."), structured_model=Vote, enable_gather=False)
    won = float(sum(len(one.get_text_content() or "") for one in votes) % 2)
    return WorkflowOutput(reward=won, metrics={"good": float(target == "good_guy"), "trainable_target": target})


@pytest.mark.skipif(find_spec("wandb") is not None, reason="the sample asks for W&B, whose absence is said")
def test_werewolves(place: Path, printed: Printed) -> None:
    """Four machines of a Ray that is not there, sixteen engines and eight, `step_norm`, a side that is set in the file,
    and a moderator that was made before the run. Red where each of these ends the script, or is lost."""
    put_rows(place / "data" / "train.jsonl", [{"seed": n} for n in range(40)])
    (place / "config.yaml").write_text(WOLVES)
    engines = {"max_model_len": 25600, "max_tokens": 8, "tool_call_parser": "hermes", "reasoning_parser": None}
    partner = put_model(place, "Qwen/Qwen3-30B-A3B-Instruct-2507")
    given = {
        "workflow_func": play,
        "judge_func": None,
        "train_dataset": DatasetConfig(path=str(place / "data"), split="train", total_steps=2),
        "model": TunerModelConfig(
            model_path=put_model(place, "Qwen/Qwen2.5-7B-Instruct"), inference_engine_num=16, **engines
        ),
        "auxiliary_models": {
            "participant": TunerModelConfig(model_path=partner, temperature=0.1, inference_engine_num=8, **engines)
        },
        "algorithm": AlgorithmConfig(group_size=2, batch_size=2, learning_rate=1e-6, save_interval_steps=100),
        "config_path": str(place / "config.yaml"),
        "settings": TOY,
    }
    with pytest.raises(ConfigError, match="'wandb' needs the package wandb") as raised:
        tune(**given)
    assert "problems" not in str(raised.value)
    result = tune(**given, monitor_type="tensorboard")
    said = printed()
    for part in ("Ray is not installed", "inference_engine_num = 16", "inference_engine_num = 8", "step_norm"):
        assert part in said, part
    assert "Night falls" not in said
    check_trained(result, 8)
    played = [one for group in read_groups(result.run_dir / "run.db") for one in group.rollouts]
    assert {one.metrics["good"] for one in played} == {1.0}, "the file says which side is trained"
