"""The LangGraph agent: its whole path by script, and two steps of training."""

import pytest
from lines import different
from scripted_models import tool_call

TASK = {"question": "What is 12 times 3?", "answer": "12 * 3 = 36\n#### 36"}


def test_tool_call_result_and_answer(scripted, play):
    from langgraph_agent.agent import run_agent
    from quickstart.agent import judge

    model = scripted(tool_call("calculator", '{"expression": "12 * 3"}'), "#### 36")
    output = play(run_agent, models=[model], task=TASK, model=model)
    assert output.response == "#### 36"
    assert output.metrics == {"answered": 1.0}
    assert model.seen == ["36"]
    assert [message["role"] for message in model.requests[-1]] == ["system", "user", "assistant", "tool"]
    assert play(judge, models=[], task=TASK, response=output.response).reward == 1.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [('{"expression": "12 *"}', "error: SyntaxError"), ('{"wrong": 1}', "Field required"), ("{}", "Field required")],
)
def test_wrong_tool_calls_are_told_to_the_model(scripted, play, arguments, told):
    from langgraph_agent.agent import run_agent

    model = scripted(tool_call("calculator", arguments), "#### 1")
    assert play(run_agent, models=[model], task=TASK, model=model).response == "#### 1"
    assert told in model.seen[0]


def test_an_agent_that_never_answers(scripted, play):
    from langgraph_agent.agent import run_agent
    from quickstart.agent import judge

    model = scripted(*(tool_call("calculator", '{"expression": "1 + 1"}', f"call_{n}") for n in range(9)))
    output = play(run_agent, models=[model], task=TASK, model=model)
    assert output.response == ""
    assert output.metrics == {"answered": 0.0}
    assert len(model.requests) == 3
    assert play(judge, models=[], task=TASK, response=output.response).reward == 0.0


@pytest.mark.parametrize("line", different("examples/langgraph_agent/main.py"), ids=" ".join)
def test_two_steps_of_training(line, short, check_run):
    from langgraph_agent.main import QUICKSTART, main

    rollouts = check_run(main([*line, *short, "--max-tokens=48", f"--data={QUICKSTART / 'data'}"]))
    assert {len(rollout.calls) for rollout in rollouts} >= {1, 2}
    assert all(call.parent == call.index - 1 for rollout in rollouts for call in rollout.calls[1:])
