"""The programs of docs/start/frameworks.md for the frameworks of this environment run as they are printed."""

from __future__ import annotations

from typing import Any

import pytest
from framework_checks import TASK, check_parallel_rollouts, check_records, check_tool_round
from page_programs import program

from sharpen.types import Outcome


@pytest.mark.parametrize("title", ["LangGraph", "OpenAI Agents SDK", "Pydantic AI", "LlamaIndex", "AgentScope 2"])
def test_a_program_with_a_tool_is_one_sequence(rollouts: Any, title: str) -> None:
    workflow = program(title)
    check_tool_round(rollouts, workflow)
    check_parallel_rollouts(rollouts, workflow, tasks=3, group_size=2)


@pytest.mark.parametrize(
    ("title", "said"),
    [("LiteLLM", TASK["answer"]), ("DSPy", f"[[ ## answer ## ]]\n{TASK['answer']}\n\n[[ ## completed ## ]]")],
)
def test_a_program_that_asks_is_one_call_of_each_rollout(rollouts: Any, title: str, said: str) -> None:
    served = rollouts(said)
    found = check_records(served.engine, served.run(program(title), tasks=[TASK], group_size=3))
    assert [(one.outcome, one.reward, len(one.calls)) for one in found] == [(Outcome.OK, 1.0, 1)] * 3, found[0].error
