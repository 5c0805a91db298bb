"""The four coding agents, unmodified, write a file: what they do is recorded as the engine sampled it."""

from __future__ import annotations

from typing import Any

import pytest
from coding_agents import AGENTS
from framework_checks import check_records

from sharpen import WorkflowOutput
from sharpen.types import CallStatus, Outcome

QUESTION = "Write 5 into answer.txt."


def workflow_of(name: str) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        ended = await model.run(**AGENTS[name].start(QUESTION, model), timeout_s=120)
        assert ended.exit_code == 0, ended.stdout + ended.stderr
        return WorkflowOutput(reward=float(ended.read_text("answer.txt") == "5\n"), response=ended.stdout)

    return workflow


@pytest.mark.parametrize("name", AGENTS)
def test_a_coding_agent_writes_a_file(rollouts: Any, name: str) -> None:
    served = rollouts(AGENTS[name].says)
    (rollout,) = check_records(served.engine, served.run(workflow_of(name), timeout_s=150))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert {each.status for each in rollout.calls} == {CallStatus.USED}
    main = [each for each in rollout.calls if each.tools]
    assert len(main) == 2
    assert main[1].parent == main[0].index
