"""AgentScope 2's own tracing: its spans of the model's answers are those of our calls."""

from __future__ import annotations

from typing import Any

from agent_scripts import add_then_answer
from agentscope.middleware import TracingMiddleware
from test_agentscope2_agent import calls_of, solve
from tracing import check_calls_are_linked, exporter


def test_the_spans_of_agentscope_are_linked_to_the_calls(rollouts: Any) -> None:
    exporter().clear()
    calls = calls_of(rollouts(add_then_answer), solve(middlewares=[TracingMiddleware()]))
    check_calls_are_linked(calls, exporter().get_finished_spans())
