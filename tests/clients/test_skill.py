"""A coding agent is asked to train an agent of its owner: Claude Code finds the skill, reads it, writes what it tells,
and runs the check. The scripted model copies from the skill as it stands in its prompt: it must have got there."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_scripts import call, tool_results
from coding_agents import PROGRAMS

from sharpen import WorkflowOutput
from sharpen.types import Outcome

ROOT = Path(__file__).parents[2]
QUESTION = "Train the model of my agent, my_agent.py, to say an even number of characters. The model is in ./model."
AGENT = """
async def answer(client, model_name, question):
    messages = [{"role": "user", "content": question}]
    reply = await client.chat.completions.create(model=model_name, messages=messages)
    return reply.choices[0].message.content
"""
TASKS = "".join(json.dumps({"question": f"question {index}"}) + "\n" for index in range(4))
CHECK = "sharpen check --tasks 2 > check.txt 2>&1; echo $? > code.txt"


def trainer(prompt: str) -> str:
    """Say what comes next: the skill, the files with what it says to write in them, the check."""
    steps = [
        lambda: call("Skill", json.dumps({"skill": "sharpen"})),
        lambda: write("workflow.py", block(prompt, "python", "async def run_agent")),
        lambda: write("judge.py", exchanged(block(prompt, "python", "async def judge"), JUDGE)),
        lambda: write("run.yaml", exchanged(block(prompt, "yaml", "algorithm_type"), SETTINGS)),
        lambda: call("Bash", json.dumps({"command": CHECK, "description": "Check", "timeout": 400_000})),
        lambda: "It is ready.",
    ]
    return steps[min(len(tool_results(prompt)), len(steps) - 1)]()


JUDGE = {'numbers[-1:] == [task["answer"]]': 'len(response or "") % 2 == 0'}
SETTINGS = {"Qwen/Qwen3-0.6B": "model", " 4096 ": " 128 ", " 512 ": " 4 "}


def block(prompt: str, language: str, marked: str) -> str:
    """Return the block of the skill with these words, as it stands in the prompt."""
    (found,) = {text for text in re.findall(rf"```{language}\n(.*?)```", prompt, re.DOTALL) if marked in text}
    return str(found)


def exchanged(text: str, places: dict[str, str]) -> str:
    for old, new in places.items():
        assert old in text
        text = text.replace(old, new)
    return text


def write(name: str, content: str) -> str:
    return call("Bash", json.dumps({"command": f"cat > {name} <<'END'\n{content}END\n", "description": "Write"}))


def test_claude_code_uses_the_skill_on_an_agent_of_its_owner(
    rollouts: Any, tmp_path: Path, toy_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the skill has no valid header, when what it tells to write is refused, or when the check fails."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{PROGRAMS}", prepend=":")
    project = tmp_path / "project"
    shutil.copytree(ROOT / "skills", project / ".claude" / "skills")
    shutil.copytree(toy_model_dir, project / "model")
    (project / "tasks").mkdir()
    (project / "my_agent.py").write_text(AGENT)
    for split in ("train", "test"):
        (project / "tasks" / f"{split}.jsonl").write_text(TASKS.replace("question ", f"{split} "))

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        arguments = ["claude", "-p", QUESTION, "--allowedTools", "Bash", "Skill"]
        ended = await model.run(arguments, folder=project, timeout_s=550)
        assert ended.exit_code == 0, ended.stdout + ended.stderr
        said, code = ended.read_text("check.txt"), ended.read_text("code.txt")
        assert said.splitlines()[-1] == "ready", said
        return WorkflowOutput(reward=float(code == "0\n"))

    (group,) = rollouts(trainer).run(workflow)
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert "Skill" in {tool["function"]["name"] for tool in rollout.calls[0].tools}
