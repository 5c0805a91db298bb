"""mini-swe-agent on our model, through LiteLLM over HTTP: commands in a folder, all of the history in each call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agent_scripts import call, turns
from framework_checks import check_records
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from sharpen import WorkflowOutput
from sharpen.types import Outcome

WRITES = call("bash", '{"command": "echo 5 > answer.txt"}')
SUBMITS = call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt"}')


def workflow_in(folder: Path, **limits: Any) -> Any:
    def mend(task: dict[str, Any], model: Any) -> WorkflowOutput:
        options = {"api_base": model.base_url, "api_key": model.api_key, "num_retries": 0}
        chat = LitellmModel(model_name=f"openai/{model.name}", model_kwargs=options, cost_tracking="ignore_errors")
        place = LocalEnvironment(cwd=str(folder))
        asked = {"system_template": "You mend files with bash.", "instance_template": "{{task}}"}
        ended = DefaultAgent(chat, place, **asked, **limits).run(task["question"])
        written = folder / "answer.txt"
        reward = float(written.exists() and written.read_text() == "5\n")
        return WorkflowOutput(reward=reward, response=f"{ended['exit_status']}: {ended['submission']}")

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        return await asyncio.to_thread(mend, task, model)

    return workflow


def test_its_commands_are_one_sequence(rollouts: Any, tmp_path: Path) -> None:
    served = rollouts(turns(WRITES, SUBMITS))
    groups = served.run(workflow_in(tmp_path), tasks=[{"question": "Write 5 into answer.txt."}])
    (rollout,) = check_records(served.engine, groups)
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert [each.parent for each in rollout.calls] == [None, 0]


@pytest.mark.parametrize(("said", "num_calls"), [(WRITES, 2), ("no tool call", 2)])
def test_at_its_limits_it_stops_without_an_exception(rollouts: Any, tmp_path: Path, said: str, num_calls: int) -> None:
    served = rollouts(said)
    workflow = workflow_in(tmp_path, step_limit=2, max_consecutive_format_errors=2)
    (rollout,) = check_records(served.engine, served.run(workflow, tasks=[{"question": "Write 5."}]))
    assert (rollout.outcome, len(rollout.calls)) == (Outcome.OK, num_calls), rollout.error
