"""The smallest client: a shell script that calls `curl`, whole and streaming."""

from __future__ import annotations

import json
from typing import Any

import pytest
from framework_checks import TASK, check_records

from sharpen import WorkflowOutput
from sharpen.types import Outcome

CHAT = {"path": "/chat/completions", "body": {"messages": [{"role": "user", "content": "2+3"}]}}
RESPONSES = {"path": "/responses", "body": {"input": "2+3"}}
MESSAGES = {"path": "/messages", "body": {"messages": [{"role": "user", "content": "2+3"}], "max_tokens": 99}}
COMPLETIONS = {"path": "/completions", "body": {"prompt": "2+3 is "}}
SCRIPT = (
    'curl --silent --fail-with-body --no-buffer "$OPENAI_BASE_URL$1" --header "authorization: Bearer $OPENAI_API_KEY"'
    ' --header "content-type: application/json" --data "$2"'
)


def workflow_of(path: str, body: dict[str, Any]) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        asked = json.dumps({"model": model.name, **body})
        ended = await model.run(["sh", "-c", SCRIPT, "sh", path, asked], timeout_s=500)
        assert ended.exit_code == 0, ended.stdout + ended.stderr
        streamed = ended.stdout.replace('"', "").count("delta") > 1
        assert streamed == body.get("stream", False) or path == "/completions"
        return WorkflowOutput(reward=1.0, response=ended.stdout)

    return workflow


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("asked", [CHAT, RESPONSES, MESSAGES, COMPLETIONS], ids=lambda asked: asked["path"])
def test_an_answer_is_one_call(rollouts: Any, asked: dict[str, Any], stream: bool) -> None:
    served = rollouts("The answer is 5.")
    body = {**asked["body"], "stream": stream}
    (rollout,) = check_records(served.engine, served.run(workflow_of(asked["path"], body), tasks=[TASK]))
    assert (rollout.outcome, len(rollout.calls)) == (Outcome.OK, 1), rollout.error
