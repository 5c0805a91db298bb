"""The smallest `run.yaml` of docs/reference/configuration.md is enough for `sharpen check`, its two files beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sharpen.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
AGENT = """
async def run_agent(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=2)
    return Output(reply.choices[0].message.content)


async def judge(task, response):
    return float(len(response or "") % 2)


class Output:
    def __init__(self, response):
        self.response = response
"""


def test_the_smallest_documented_file_is_enough(tmp_path: Path, toy_model_dir: Path, capsys, monkeypatch) -> None:
    """Red while `path: tasks.jsonl` ended in "dataset_name should be specified"."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for printed, here in (("Qwen/Qwen3-0.6B", str(toy_model_dir)), ("4096", "64")):
        assert printed in text
        text = text.replace(printed, here)
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    main(["check", "--config", "run.yaml"])
    said = capsys.readouterr().out
    assert "rewards" in said
    assert "failures    none" in said
