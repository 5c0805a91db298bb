"""AgentScope 1 in the documentation: its program in docs/start/frameworks.md, the lines of docs/use/agentscope.md."""

from __future__ import annotations

from typing import Any

from framework_checks import check_parallel_rollouts, check_tool_round
from page_programs import program
from pages import blocks

import sharpen


def test_the_program_runs_as_it_is_printed(rollouts: Any) -> None:
    workflow = program("AgentScope 1")
    check_tool_round(rollouts, workflow)
    check_parallel_rollouts(rollouts, workflow, tasks=3, group_size=2)


def test_the_import_lines_are_all_that_a_script_changes() -> None:
    (lines,) = [block.text for block in blocks("python") if block.page == "docs/use/agentscope.md"]
    names: dict[str, Any] = {}
    exec(compile(lines, "agentscope.md", "exec", dont_inherit=True), names)
    assert names["tune"] is sharpen.tune
    assert {"ReActAgent", "OpenAIChatModel", "DatasetConfig", "JudgeOutput"} <= names.keys()
