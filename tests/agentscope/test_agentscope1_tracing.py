"""AgentScope 1's own tracing: its spans of the model's answers are those of our calls."""

from __future__ import annotations

from typing import Any

from agent_scripts import add_then_answer
from agentscope import _config
from test_agentscope1_react import calls_of, solve
from tracing import check_calls_are_linked, exporter


def test_the_spans_of_agentscope_are_linked_to_the_calls(rollouts: Any) -> None:
    exporter().clear()

    async def workflow(task: dict[str, Any], model: Any) -> Any:
        _config.trace_enabled = True  # as agentscope.init(tracing_url=...) does, for this context
        return await solve()(task, model)

    calls = calls_of(rollouts(add_then_answer), workflow)
    check_calls_are_linked(calls, exporter().get_finished_spans())
