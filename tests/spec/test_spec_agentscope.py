"""The documents' complete programs, run as they are: AgentScope's real agents, a toy model under the documents' names.

Each runs in a process and a folder of its own, the folder being what the documents call `math_agent/`.
"""

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import forked, python

pytestmark = pytest.mark.agentscope

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
QUICKSTART_MODEL = HERE.parents[1] / "examples" / "quickstart" / "model"
GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""


@pytest.fixture
def math_agent(tmp_path: Path) -> Path:
    """The working directory: `my_dataset/`, and models where their hub names point."""
    folder = tmp_path / "math_agent"
    (folder / "my_dataset").mkdir(parents=True)
    sums = [(a, b) for a in range(2, 9) for b in range(2, 7)]
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in sums]
    write_jsonl(folder / "my_dataset" / "train.jsonl", rows)
    write_jsonl(folder / "my_dataset" / "test.jsonl", rows[:4])
    return folder


def put_model(folder: Path, name: str) -> None:
    """The quickstart's model with room for the documents' `max_model_len` (rotary positions need no weights)."""
    shutil.copytree(QUICKSTART_MODEL, folder / name)
    config = folder / name / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 40960}))


def put_gsm8k(folder: Path) -> None:
    """`openai/gsm8k` in its own layout: a card with the configuration `main`, a file for each split."""
    (folder / "openai" / "gsm8k" / "main").mkdir(parents=True)
    (folder / "openai" / "gsm8k" / "README.md").write_text(GSM8K_CARD)
    for split, numbers in (("train", range(2, 22)), ("test", range(22, 26))):
        rows = [
            {"question": f"Ann has {n} pens and buys 3. How many now?", "answer": f"{n} + 3\n#### {n + 3}"}
            for n in numbers
        ]
        write_jsonl(folder / "openai" / "gsm8k" / "main" / f"{split}-00000-of-00001.jsonl", rows)


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, *command: str, start: Callable[..., Any] = forked) -> list[str]:
    """Run a command there; the lines that it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    with start(*command, cwd=folder, env=environment) as process:
        output, errors = process.communicate(timeout=800)
    assert process.returncode == 0, output + errors
    return output.splitlines()


def run_dir_of(lines: list[str]) -> Path:
    return Path(lines[-1].removeprefix("run directory: "))


def journal(run_dir: Path, query: str) -> list[tuple]:
    with sqlite3.connect(run_dir / "run.db") as connection:
        return connection.execute(query).fetchall()


def test_the_second_editions_program(math_agent: Path):
    put_model(math_agent, "Qwen/Qwen3-0.6B")
    shutil.copy(PROGRAMS / "math_agent.py", math_agent / "main.py")
    run_dir = run_dir_of(run(math_agent, "main.py", start=python))
    assert run_dir.parent == math_agent / "checkpoints" / "AgentScope"
    assert re.fullmatch(r"Experiment-\d{14}", run_dir.name)
    assert list((run_dir / "monitor" / "tensorboard").iterdir())
    assert (run_dir / "global_step_1" / "model.safetensors").exists()
    settings = {name: entry["value"] for name, entry in json.loads((run_dir / "resolved.json").read_text()).items()}
    assert settings["algorithm.group_size"] == 8
    assert settings["algorithm.batch_size"] == 32
    assert settings["algorithm.learning_rate"] == 1e-6
    assert settings["model.max_model_len"] == 16384
    (count,) = journal(run_dir, "SELECT count(*) FROM rollouts WHERE is_final")[0]
    assert count == 32 * 8
    assert check_rewards(run_dir, lambda truth, text: float(truth in text)) == {0.0, 1.0}


def check_rewards(run_dir: Path, expected) -> set[float]:
    """The journal's rewards are what the document's judge gives for the answers that stand beside them."""
    rewards = set()
    for row, response, reward in journal(
        run_dir,
        "SELECT t.json, c.response, r.reward FROM rollouts r JOIN groups g ON g.key = r.group_key "
        "JOIN texts t ON t.id = g.task_row JOIN calls c ON c.rollout_key = r.key "
        "WHERE r.outcome = 'ok' AND c.idx = (SELECT max(idx) FROM calls WHERE rollout_key = r.key)",
    ):
        text = json.loads(response).get("content") or ""
        assert reward == expected(json.loads(row)["answer"], text), (row, text)
        rewards.add(reward)
    return rewards


def test_the_model_is_agentscopes_own_class(math_agent: Path):
    """The second edition: "has the same interface as `OpenAIChatModel`". Here it is one; so in the first edition."""
    put_model(math_agent, "Qwen/Qwen3-0.6B")
    shutil.copy(PROGRAMS / "math_agent.py", math_agent / "program.py")
    script = """
import program
from agentscope.model import ChatModelBase, OpenAIChatModel
from sharpen import AlgorithmConfig, DatasetConfig, TrinityChatModel, TunerModelConfig, tune
seen = set()
async def workflow(task, model, auxiliary_models):
    seen.add(tuple(isinstance(model, kind) for kind in (OpenAIChatModel, ChatModelBase, TrinityChatModel)))
    return await program.run_react_agent(task, model, auxiliary_models)
tune(
    workflow_func=workflow,
    judge_func=program.judge_function,
    train_dataset=DatasetConfig(path="my_dataset", split="train", total_steps=1),
    model=TunerModelConfig(model_path="Qwen/Qwen3-0.6B", max_model_len=512, max_tokens=16),
    algorithm=AlgorithmConfig(group_size=4, batch_size=2),
    settings={"evaluation.before_and_after": False, "check.enabled": False},
)
print(seen)
"""
    assert run(math_agent, "-c", script)[-1] == "{(True, True, True)}"


def test_the_first_editions_program(math_agent: Path):
    """Model, algorithm and sizes come from the file, in Trinity's format; the dataset argument overrides the file's."""
    put_model(math_agent, "Qwen/Qwen3-1.7B")
    for name in ("math_agent_first_edition.py", "config.yaml"):
        shutil.copy(PROGRAMS / name, math_agent / name)
    lines = run(math_agent, "math_agent_first_edition.py")
    run_dir = run_dir_of(lines)
    assert run_dir.parent == math_agent / "checkpoints" / "AgentScope"
    assert (run_dir / "global_step_2" / "model.safetensors").exists()
    assert any(line.startswith("override: train_dataset.path = 'my_dataset' (argument)") for line in lines)
    (count,) = journal(run_dir, "SELECT count(*) FROM rollouts WHERE is_final")[0]
    assert count == 2 * 16 * 8
    assert check_rewards(run_dir, lambda truth, text: float(text.strip() == truth.strip()))


def test_the_second_editions_program_from_a_file(math_agent: Path):
    """The call that the second edition shows in a comment: everything but the functions from `config.yaml`."""
    put_model(math_agent, "Qwen/Qwen3-1.7B")
    shutil.copy(PROGRAMS / "math_agent.py", math_agent / "program.py")
    config = (PROGRAMS / "config.yaml").read_text(encoding="utf-8").replace("another_dataset", "my_dataset")
    (math_agent / "config.yaml").write_text(config)
    script = """
from program import judge_function, run_react_agent, tune
tune(
    workflow_func=run_react_agent,
    judge_func=judge_function,
    config_path="config.yaml",
)
"""
    lines = run(math_agent, "-c", script)
    assert not [line for line in lines if line.startswith("override:")]
    assert check_rewards(run_dir_of(lines), lambda truth, text: float(truth in text)) == {0.0, 1.0}


@pytest.mark.parametrize("edition", ["", "_zh"])
def test_the_trinity_workflow(edition: str, math_agent: Path):
    """`sharpen run --config gsm8k.yaml`, with the documents' workflow class and AgentScope's agent in it."""
    put_model(math_agent, "Qwen/Qwen3-8B")
    put_gsm8k(math_agent)
    for name in (f"react_workflow{edition}.py", f"gsm8k{edition}.yaml"):
        shutil.copy(PROGRAMS / name, math_agent / name)
    lines = run(math_agent, "-m", "sharpen.cli.main", "run", "--config", f"gsm8k{edition}.yaml")
    run_dir = run_dir_of(lines)
    assert any("sync.style dynamic_by_explorer, interval 2" in line for line in lines)
    name = "react-gsm8k" + edition.replace("_", "-")
    assert run_dir == math_agent / "checkpoints" / "AgentScope" / name
    assert (run_dir / "global_step_2" / "model.safetensors").exists()
    (count,) = journal(run_dir, "SELECT count(*) FROM rollouts WHERE is_final")[0]
    assert count == 2 * 8 * 8
    (trained,) = journal(run_dir, "SELECT count(*) FROM trained")[0]
    assert trained > 0
    rewards = check_rewards(run_dir, lambda truth, text: float(truth.rpartition("####")[2].strip() in text))
    assert rewards == {0.0, 1.0}
