"""The example `math_agent`: the prompts that its agent sends, its judges, its file, and that it learns."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_scripts import call, tool_results
from agentscope.message import Msg, TextBlock
from transformers import AutoTokenizer

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.cli.main import main as command_line
from sharpen.compat.files import load_config
from sharpen.config.load import resolve, value_leaves
from sharpen.learning.experience.reading import read_groups, read_steps
from sharpen.types import Outcome

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "math_agent"
sys.path.insert(0, str(EXAMPLES))

from math_agent import gsm8k  # noqa: E402
from math_agent import main as example  # noqa: E402
from quickstart.agent import SYSTEM, TOOLS  # noqa: E402

MODEL = EXAMPLES / "quickstart" / "model"


@pytest.fixture(scope="module")
def data() -> str:
    return str(gsm8k.write_data())


@pytest.fixture(scope="module")
def two_steps(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps."""
    result = tune(
        workflow_func=example.run_react_agent,
        judge_func=example.judge_number,
        train_dataset=DatasetConfig(path=data, name="main", split="train", total_steps=2),
        eval_dataset=DatasetConfig(path=data, name="main", split="test"),
        model=TunerModelConfig(model_path=str(MODEL), max_model_len=512, max_tokens=48),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=8, batch_size=4, learning_rate=3e-4),
        settings={
            "checkpoint_root_dir": str(tmp_path_factory.mktemp("runs")),
            "loss.kl": "none",
            "evaluation.max_tasks": 32,
        },
    )
    return result.run_dir


def test_prompts_are_the_ones_that_the_model_was_taught(two_steps: Path) -> None:
    """Token by token what transformers makes of plain messages and the quickstart's tool, in every call."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    made = [each for group in read_groups(two_steps / "run.db") for rollout in group.rollouts for each in rollout.calls]
    assert {each.index for each in made} >= {0, 1}
    for each in made:
        assert json.dumps(each.tools[0]) == json.dumps(TOOLS[0])
        plain: list[Any] = [{"role": "system", "content": SYSTEM}]
        for message in each.messages[1:]:
            plain.append({"role": message["role"], "content": said_by(message)})
            if message.get("tool_calls"):
                plain[-1]["tool_calls"] = message["tool_calls"]
        text = tokenizer.apply_chat_template(plain, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(each.prompt_ids_P) == text
        if each.index == 0:
            assert each.prompt_ids_P.tolist() == tokenizer.encode(text, add_special_tokens=False)


def said_by(message: Any) -> str:
    """AgentScope sends lists of text blocks, except for tool results."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


def test_a_rollout_is_one_sequence(two_steps: Path) -> None:
    """AgentScope's messages continue the recorded ids, although it puts a name to what the model said."""
    rollouts = [rollout for group in read_groups(two_steps / "run.db") for rollout in group.rollouts]
    assert len(rollouts) == 2 * 4 * 8
    assert all(rollout.outcome == Outcome.OK for rollout in rollouts)
    later = [each for rollout in rollouts for each in rollout.calls[1:]]
    assert later
    # Arguments that AgentScope writes back otherwise than the model did start a new sequence; here that is rare.
    assert sum(each.parent is None for each in later) <= len(later) / 20
    for step in read_steps(two_steps / "run.db"):
        assert step.metrics["trainer/logprob_gap_max"] < 1e-4


def judged(judge: Any, said: str | None, answer: str) -> Any:
    content = [] if said is None else [TextBlock(type="text", text=said)]
    return asyncio.run(judge({"question": "?", "answer": answer}, Msg("react_agent", content, "assistant")))


@pytest.mark.parametrize(
    ("said", "reward"), [("#### 1080", 1.0), ("so 7, #### 1,080.0", 1.0), ("#### 41", 0.0), ("", 0.0), (None, 0.0)]
)
def test_judge_of_numbers(said: str | None, reward: float) -> None:
    assert judged(example.judge_number, said, "12 * 90\n#### 1,080").reward == reward


@pytest.mark.parametrize(
    ("said", "accuracy"),
    [
        ("It is \\boxed{1080}.", 1.0),
        ("First \\boxed{7}, then \\boxed{1,080}", 1.0),
        ("It is \\boxed{41}.", 0.0),
        ("It is 1080.", 0.0),
        (None, 0.0),
    ],
)
def test_judge_of_boxes_gives_accuracy_and_format(said: str | None, accuracy: float) -> None:
    judgement = judged(example.judge_boxed, said, "12 * 90\n#### 1,080")
    assert judgement.metrics == {"accuracy": accuracy, "format_score": 0.0}
    assert judgement.reward == accuracy


def test_the_boxed_agent_uses_the_tool_and_is_judged(rollouts: Any) -> None:
    """The workflow of real models, with a scripted one: a tool call, its result, an answer in a box."""

    def said(prompt: str) -> str:
        results = tool_results(prompt)
        if not results:
            return call("calculator", '{"expression": "12 * 90"}')
        return f"It is \\boxed{{{results[-1]}}}."

    tasks = [{"question": "What is 12 times 90?", "answer": "12 * 90\n#### 1,080"}]
    (group,) = rollouts(said).run(example.run_boxed_agent, example.judge_boxed, tasks=tasks)
    (rollout,) = group.rollouts
    assert rollout.outcome == Outcome.OK, rollout.error
    assert [each.parent for each in rollout.calls] == [None, 0]
    assert rollout.metrics["judge/accuracy"] == 1.0
    assert rollout.reward == sum(rollout.metrics[f"judge/{name}"] for name in ("accuracy", "format_score"))


def test_the_configuration_file_trains(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sharpen run`, and `tune(config_path=...)` with workflow and judge; the file's values arrive."""
    monkeypatch.setenv("MATH_AGENT_CHECKPOINTS", str(tmp_path))
    short = {"train_dataset.total_steps": 1, "algorithm.batch_size": 2, "evaluation.max_tasks": 8}
    settings = [part for name, value in short.items() for part in ("--set", f"{name}={value}")]
    assert command_line(["run", "--config", str(EXAMPLE / "config.yaml"), *settings]) == 0
    result = tune(
        workflow_func=example.run_react_agent,
        judge_func=example.judge_number,
        config_path=EXAMPLE / "config.yaml",
        experiment_name="in-python",
        settings=short,
    )
    assert result.run_dir == tmp_path / "MathAgent" / "in-python"
    runs = list((tmp_path / "MathAgent").iterdir())
    assert len(runs) == 2
    for run in runs:
        resolved = {name: entry["value"] for name, entry in json.loads((run / "resolved.json").read_text()).items()}
        assert resolved["algorithm.learning_rate"] == 3e-4
        assert resolved["algorithm.group_size"] == 8
        assert resolved["loss.kl"] == "none"
        assert resolved["model.max_tokens"] == 48
        assert resolved["train_dataset.name"] == resolved["eval_dataset.name"] == "main"
        assert Path(resolved["train_dataset.path"]).samefile(data)
        (group, *_) = read_groups(run / "run.db")
        assert all(rollout.outcome == Outcome.OK for rollout in group.rollouts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example with fewer steps than its 40, to keep the time; about a minute and a half on two busy cores."""
    monkeypatch.chdir(tmp_path)
    result = example.main(["--steps", "16"])
    resolved = json.loads((result.run_dir / "resolved.json").read_text())
    for place, value in value_leaves(resolve(load_config(EXAMPLE / "config.yaml")).config).items():
        if place[0] in ("algorithm", "loss", "trainer"):
            assert resolved[".".join(place)]["value"] == value, f"config.yaml and main.py differ in {place}"
    assert result.before["greedy"].num_tasks == result.after["greedy"].num_tasks == 512
    assert result.before["greedy"].accuracy < 0.5
    assert result.after["greedy"].accuracy >= 0.9
    assert result.after["sampled"].accuracy >= 0.8
