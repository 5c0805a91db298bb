"""The prompt first, then the weights: the workflow by script, the stand-in that proposes, and both steps in short."""

import pytest
from lines import different

TASK = {"question": "What is 12 times 3?", "answer": "#### 36"}


def test_the_prompt_reaches_the_model(scripted, play):
    from prompt_then_rl.agent import run_agent

    model = scripted("#### 36")
    output = play(run_agent, models=[model], task=TASK, system_prompt="Be a calculator.", model=model)
    assert output.response == "#### 36"
    assert model.requests[0][0] == {"role": "system", "content": "Be a calculator."}


@pytest.mark.parametrize("line", different("examples/prompt_then_rl/main.py"), ids=" ".join)
def test_both_steps_and_what_each_gained(line, short, check_run, capsys):
    from prompt_then_rl.main import PROMPT, QUICKSTART, main
    from prompt_then_rl.proposer import PROPOSALS

    options = [*line, *short, "--max-tokens=48", f"--data={QUICKSTART / 'data'}"]
    prompt, figures, result = main([*options, "--eval-tasks=8", "--prompt-tasks=30"])
    assert prompt in PROPOSALS
    assert figures["validation_after"] > figures["validation_before"]
    assert figures["num_tasks"] == 8
    rollouts = check_run(result)
    assert {call.messages[0]["content"] for rollout in rollouts for call in rollout.calls} == {prompt}
    assert prompt != PROMPT
    said = capsys.readouterr().out
    assert f"the prompt:  {figures['before']:.3f} -> {figures['after']:.3f}" in said
    assert "the weights: " in said
