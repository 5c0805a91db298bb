"""The laptop's example trains adapters by each of its documented lines, with the quickstart's model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lines import different
from scripted_models import tool_call

TASK = {"question": "What is 3 times 4?", "answer": "#### 12"}


def test_the_agent_uses_the_calculator(scripted: Any, play: Any) -> None:
    from laptop.main import run_agent

    model = scripted(tool_call("calculator", '{"expression": "3 * 4"}'), "#### 12")
    assert play(run_agent, models=[model], task=TASK, model=model).response == "#### 12"
    assert model.seen == ["12"]


def test_an_agent_that_never_answers(scripted: Any, play: Any) -> None:
    from laptop.main import MAX_CALLS, run_agent

    model = scripted(*(tool_call("calculator", '{"expression": "1 + 1"}', f"call_{n}") for n in range(9)))
    assert play(run_agent, models=[model], task=TASK, model=model).response is None
    assert len(model.requests) == MAX_CALLS


@pytest.mark.parametrize("line", different("examples/laptop/main.py"), ids=" ".join)
def test_two_steps_of_training(line: list[str], short: list[str], check_run: Any) -> None:
    from laptop.main import QUICKSTART, main

    model = ["--model", str(QUICKSTART / "model")]
    result = main([*line, *short, *model, "--max-tokens=48", f"--data={QUICKSTART / 'data'}"])
    check_run(result)
    hours = float(line[line.index("--hours") + 1]) if "--hours" in line else 3.0
    resolved = json.loads((result.run_dir / "resolved.json").read_text())
    assert resolved["time_limit_s"]["value"] == hours * 3600
