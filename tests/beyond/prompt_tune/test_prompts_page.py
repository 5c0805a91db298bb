"""The programs of docs/use/prompts.md run as they are printed, on models by script."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import forked

from sharpen import PromptTuneConfig
from sharpen.beyond.prompt_tune.settings import SIZES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "use" / "prompts.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "examples"))


def test_the_first_program(toy_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as a reader runs it: its client, made at the top, is open until the process ends."""
    from parts.stand_in import stand_in

    def answer(messages: Any) -> str:
        system, user = messages[0]["content"], messages[1]["content"]
        return user.split()[-1] if "level 8" in system or user.endswith("1") else "?"

    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    for old, new in {
        '"my_dataset"': repr(str(toy_dataset)),
        'lm_model_name="openai/gpt-4.1"': "lm_model_name=LM",
    }.items():
        assert old in code
        code = code.replace(old, new)
    code = f"from levels import scripted\nLM = scripted(2, 8, 5)[0]\n{code}\nprint([prompt, figures['after']])"
    with stand_in(answer) as base_url:
        monkeypatch.setenv("OPENAI_BASE_URL", base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        with forked("-c", code) as process:
            said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert ast.literal_eval(said.splitlines()[-1]) == ["You are of level 8.", 1.0]


def test_the_others_are_python_and_the_tables_are_what_the_code_does() -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        ast.parse(code)
    fields = {name: field.default for name, field in PromptTuneConfig.model_fields.items()}
    assert set(fields) <= set(re.findall(r"`(\w+)`", PAGE))
    numbers = dict(re.findall(r"`(\w+)` \((\d+) ", PAGE))
    assert numbers
    assert {name: int(number) for name, number in numbers.items()} == {name: fields[name] for name in numbers}
    assert re.findall(r"^\| `(\w+)` \(default\)", PAGE, re.MULTILINE) == [
        fields["optimization_level"],
        fields["optimizer"],
    ]
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert [(level, int(prompts), int(tasks)) for level, prompts, tasks in rows] == [
        (level, size.num_candidates, size.num_validation) for level, size in SIZES.items()
    ]
