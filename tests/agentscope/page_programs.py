"""The programs of docs/start/frameworks.md, as they are printed.

In: a section's title. Out: its workflow; each calls a tool `add`, or just asks.
"""

from __future__ import annotations

from typing import Any

from pages import ROOT

from sharpen import WorkflowOutput

PAGE = ROOT / "docs" / "start" / "frameworks.md"


def program(title: str) -> Any:
    """Return the workflow of a section, which here also says whether its answer is right."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    code = section.partition("\n## ")[0].partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "agent"}
    exec(compile(code, f"{PAGE.name}: {title}", "exec", dont_inherit=True), names)

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        output: WorkflowOutput = await names["run_agent"](task, model)
        return WorkflowOutput(response=output.response, reward=float(task["answer"] in (output.response or "")))

    return workflow
