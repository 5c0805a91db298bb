"""The agent that is a shell script: its whole path by script, and two steps of training."""

import pytest
from lines import different
from scripted_models import tool_call

from sharpen.placement.auxiliary.endpoint import Endpoint

TASK = {"question": 'What is 12 times "3"?', "answer": "12 * 3 = 36\n#### 36"}


def model_of(server):
    return Endpoint(base_url=server.base_url, name="m", api_key="k")


def test_tool_call_result_and_answer(scripted, play):
    from any_command.workflow import run_agent
    from quickstart.agent import judge

    server = scripted(tool_call("calculator", '{"expression": "12 * 3"}'), "#### 36")
    output = play(run_agent, models=[], task=TASK, model=model_of(server))
    assert output.response == "#### 36"
    assert server.seen == ["36"]
    assert [message["role"] for message in server.requests[-1]] == ["system", "user", "assistant", "tool"]
    assert server.requests[0][1]["content"] == TASK["question"]
    assert play(judge, models=[], task=TASK, response=output.response).reward == 1.0


def test_the_calculator_runs_nothing_else(scripted, play, tmp_path):
    from any_command.workflow import run_agent

    expression = f'{{"expression": "system(\\"touch {tmp_path}/made\\")"}}'
    server = scripted(tool_call("calculator", expression), tool_call("calculator", "{}", "call_2"), "#### 1")
    assert play(run_agent, models=[], task=TASK, model=model_of(server)).response == "#### 1"
    assert [message["content"] for message in server.requests[-1] if message["role"] == "tool"] == ["error"] * 2
    assert not (tmp_path / "made").exists()


def test_an_agent_that_never_answers(scripted, play):
    from any_command.workflow import run_agent
    from quickstart.agent import judge

    server = scripted(*(tool_call("calculator", '{"expression": "1 + 1"}', f"call_{n}") for n in range(9)))
    output = play(run_agent, models=[], task=TASK, model=model_of(server))
    assert output.response == ""
    assert len(server.requests) == 3
    assert play(judge, models=[], task=TASK, response=output.response).reward == 0.0


def test_a_server_that_fails_is_no_wrong_answer(play):
    from any_command.workflow import run_agent

    nobody = Endpoint(base_url="http://127.0.0.1:9/v1", name="m", api_key="k")
    with pytest.raises(RuntimeError, match=r"agent\.sh ended with 7: curl"):
        play(run_agent, models=[], task=TASK, model=nobody)


@pytest.mark.parametrize("line", different("examples/any_command/main.py"), ids=" ".join)
def test_two_steps_of_training(line, short, check_run):
    from any_command.main import QUICKSTART, main

    rollouts = check_run(main([*line, *short, "--max-tokens=48", f"--data={QUICKSTART / 'data'}"]))
    assert {len(rollout.calls) for rollout in rollouts} >= {1, 2}
    assert all(call.parent == call.index - 1 for rollout in rollouts for call in rollout.calls[1:])
