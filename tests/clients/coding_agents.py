"""How each coding agent is started on our model: what a user writes, and what the scripted model says to it.

In: a question, a model object. Out: the arguments of `model.run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_scripts import call, tool_results

PROGRAMS = Path(__file__).parents[2] / ".venv-clients" / "node" / "node_modules" / ".bin"
WRITES = "echo 5 > answer.txt"


def claude(question: str, model: Any) -> dict[str, Any]:
    return {"arguments": [PROGRAMS / "claude", "-p", question, "--allowedTools", "Bash"]}


def codex(question: str, model: Any) -> dict[str, Any]:
    provider = f'{{name="ours", base_url="{model.base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    options = ["-c", f"model_providers.ours={provider}", "-c", "model_provider=ours", "-m", model.name]
    free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return {"arguments": [PROGRAMS / "codex", "exec", *free, *options, question]}


def opencode(question: str, model: Any) -> dict[str, Any]:
    reached = {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": reached, "models": {model.name: {}}}
    files = {"opencode.json": json.dumps({"provider": {"ours": provider}})}
    return {"arguments": [PROGRAMS / "opencode", "run", "-m", f"ours/{model.name}", question], "files": files}


def qwen(question: str, model: Any) -> dict[str, Any]:
    return {"arguments": [PROGRAMS / "qwen", "-p", question, "--auth-type", "openai", "--yolo"]}


@dataclass(frozen=True)
class CodingAgent:
    """An agent: how it is started, and the call by which it runs a shell command, as it sends it back itself."""

    start: Callable[[str, Any], dict[str, Any]]
    tool: str
    arguments: str

    def says(self, prompt: str) -> str:
        """What the scripted model says: it writes the file, then it is done. Side calls want a title."""
        if "title generator" in prompt:
            return "Writing five"
        return "Done." if tool_results(prompt) else "I write it.\n" + call(self.tool, self.arguments)


AGENTS = {
    "claude": CodingAgent(claude, "Bash", json.dumps({"command": WRITES, "description": "Write"})),
    "codex": CodingAgent(codex, "exec_command", json.dumps({"cmd": WRITES})),
    "opencode": CodingAgent(opencode, "bash", f'{{"command":"{WRITES}","description":"Write"}}'),
    "qwen": CodingAgent(qwen, "run_shell_command", f'{{"command":"{WRITES}","is_background":false}}'),
}
