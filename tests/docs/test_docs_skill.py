"""The skill for coding agents: a header as the format has it, and files that `sharpen check` accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from pages import ROOT, blocks

from sharpen.cli.main import main

SKILL = "skills/sharpen/SKILL.md"
AGENT = """
async def answer(client, model_name, question):
    messages = [{"role": "user", "content": question}]
    reply = await client.chat.completions.create(model=model_name, messages=messages)
    return reply.choices[0].message.content
"""


def test_the_header_is_as_agents_read_it() -> None:
    """The folder's name in small letters, and a description of at most 1024 characters that says when to use it."""
    text = (ROOT / SKILL).read_text(encoding="utf-8")
    (header,) = re.findall(r"\A---\n(.*?)\n---\n", text, re.DOTALL)
    told = yaml.safe_load(header)
    assert told.keys() == {"name", "description"}
    assert told["name"] == Path(SKILL).parent.name == "sharpen"
    assert "Use when" in told["description"]
    assert len(told["description"]) <= 1024
    assert len(text.splitlines()) < 500


def written(language: str) -> list[str]:
    return [block.text for block in blocks(language) if block.page == SKILL]


def test_what_it_says_to_write_passes_the_check(
    tmp_path: Path, toy_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workflow, judge = written("python")
    (settings,), (task,) = written("yaml"), written("json")
    files = {
        "my_agent.py": AGENT,
        "workflow.py": workflow,
        "judge.py": judge,
        "run.yaml": small(settings, toy_model_dir),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    rows = [json.dumps({**json.loads(task), "question": f"What is {index} + 4?"}) for index in range(8)]
    for split, few in (("train", rows[:4]), ("test", rows[4:])):
        (tmp_path / "tasks" / f"{split}.jsonl").write_text("\n".join(few))
    monkeypatch.chdir(tmp_path)
    code = main(["check"])
    said = capsys.readouterr()
    assert code in (0, 1), said.err  # 1: the toy's rewards may be equal; the files are accepted
    assert re.search(r"^train/0 ", said.out, re.MULTILINE), said.err
    assert re.search(r"^failures +none$", said.out, re.MULTILINE), said.out


def small(settings: str, model: Path) -> str:
    """Return the settings with a toy model, and little of everything."""
    for old, new in {"Qwen/Qwen3-0.6B": str(model), " 4096 ": " 128 ", " 512 ": " 4 "}.items():
        assert old in settings
        settings = settings.replace(old, new)
    return settings
