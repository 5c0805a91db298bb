"""Trinity's agents with Python as their tool, on AgentScope 1's real agent; and the tool itself."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from agent_scripts import call, tool_results, turns

from sharpen.compat.trinity import workflow_function
from sharpen.compat.trinity.task import TasksetConfig
from sharpen.compat.trinity.workflows.react_math import MOST_BYTES, execute_python_code, run_python
from sharpen.types import CallStatus, Outcome

KEYS = {"prompt_key": "question", "response_key": "answer"}
ROW = {"question": "What is 6 times 7?", "answer": "6*7=<<6*7=42>>42\n#### 42"}
COMPUTE = call("execute_python_code", '{"code": "print(6 * 7)"}')
NAME, OLD_NAME = "agentscope_react_math_workflow", "agentscopev0_react_math_workflow"


def function(name: str, **taskset: Any) -> Any:
    return workflow_function(name, TasksetConfig(**KEYS, **taskset), {})


def boxed(number: str) -> str:
    return call("generate_response", f'{{"response": "x", "result": "It is \\\\boxed{{{number}}}."}}')


def structured(prompt: str) -> str:
    """Computes, and answers with the result in a box."""
    results = tool_results(prompt)
    if len(results) == 1:
        return boxed(results[0].partition("<stdout>")[2].partition("</stdout>")[0].strip())
    return "It is so." if results else COMPUTE


def test_the_result_of_the_code_is_the_answer(rollouts: Any) -> None:
    (group,) = rollouts(structured).run(function(NAME, rollout_args={"temperature": 0.7}), tasks=[ROW], group_size=2)
    for rollout in group.rollouts:
        assert (rollout.outcome, rollout.error, rollout.reward) == (Outcome.OK, None, 1.0)
        assert dict(rollout.call_rewards) == dict.fromkeys(range(3), 1.0)
        assert all(each.status == CallStatus.USED for each in rollout.calls)
        assert rollout.calls[0].sampling.temperature == 0.7
        assert {tool["function"]["name"] for tool in rollout.calls[0].tools} == {
            "execute_python_code",
            "generate_response",
        }
        assert rollout.metrics["react_memory_length"] >= 5  # question, code, its result, answer, its result
    (group,) = rollouts(turns(boxed("41"), "So it is.")).run(function(NAME), tasks=[ROW])
    assert group.rollouts[0].reward == 0.0


def test_without_a_structured_answer_the_text_counts(rollouts: Any) -> None:
    (group,) = rollouts("I say \\boxed{42}, and call nothing.").run(function(NAME), tasks=[ROW])
    rollout = group.rollouts[0]
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0)
    assert len(rollout.calls) == 11  # ten rounds, and one to sum up


def test_the_name_of_agentscope_0_ends_with_the_first_text(rollouts: Any) -> None:
    (group,) = rollouts(turns(COMPUTE, "It is \\boxed{42}.")).run(function(OLD_NAME), tasks=[ROW])
    rollout = group.rollouts[0]
    assert (rollout.error, rollout.reward, len(rollout.calls)) == (None, 1.0, 2)
    (group,) = rollouts(lambda prompt: "\\boxed{7}" if "maximum iterations" in prompt else COMPUTE).run(
        function(OLD_NAME), tasks=[ROW]
    )
    assert (group.rollouts[0].reward, len(group.rollouts[0].calls)) == (0.0, 6)


def test_the_tool_says_what_came_of_the_code() -> None:
    code = "import sys; print('é'); sys.stderr.write('oh'); sys.exit(3)"
    said = asyncio.run(run_python(code, 30.0))
    assert said == "<returncode>3</returncode><stdout>é\n</stdout><stderr>oh</stderr>"
    (block,) = asyncio.run(execute_python_code("print(6 * 7)")).content
    assert block["text"] == "<returncode>0</returncode><stdout>42\n</stdout><stderr></stderr>"


def test_code_that_takes_too_long_or_prints_too_much_is_ended() -> None:
    start = time.monotonic()
    late = asyncio.run(run_python("print('a')\nwhile True: pass", 1.0))
    assert late.startswith("<returncode>-1</returncode><stdout>a\n</stdout>")
    assert "TimeoutError" in late
    much = asyncio.run(run_python("while True: print('x' * 1000)", 30.0))
    assert f"more than {MOST_BYTES} bytes" in much
    assert len(much) < 2 * MOST_BYTES
    assert time.monotonic() - start < 18


def test_what_a_program_prints_may_be_more_than_a_pipe_holds() -> None:
    assert len(asyncio.run(run_python("print('x' * 150_000)", 30.0))) > 150_000


def test_code_ends_with_the_rollout_that_runs_it(rollouts: Any, tmp_path: Path) -> None:
    """Also what it started itself."""
    beats = tmp_path / "beats"
    child = f"import time\nwhile True: open({str(beats)!r}, 'a').write('.'); time.sleep(0.05)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    endless = call("execute_python_code", json.dumps({"code": code}))
    (group,) = rollouts(endless).run(function(NAME), tasks=[ROW], timeout_s=4.0)
    assert group.rollouts[0].outcome != Outcome.OK
    time.sleep(0.3)
    size = beats.stat().st_size
    assert size > 0
    time.sleep(0.5)
    assert beats.stat().st_size == size


@pytest.mark.parametrize("name", [NAME, OLD_NAME])
def test_a_task_without_a_truth_is_named(rollouts: Any, name: str) -> None:
    (group,) = rollouts("x").run(function(name), tasks=[{"question": "?"}])
    assert "task_args.response_key" in str(group.rollouts[0].error)
