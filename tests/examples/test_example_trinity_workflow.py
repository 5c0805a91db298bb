"""The Trinity workflow: a run of its script, what its YAML resolves to, and two steps by the command line."""

from pathlib import Path

import pytest
from scripted_models import tool_call

YAML = Path(__file__).resolve().parents[2] / "examples" / "trinity_workflow" / "calculator.yaml"
ROW = {"question": "What is 12 times 3?", "answer": "12 * 3 = 36\n#### 36"}


def run(scripted, play, *replies):
    """The experiences of one run on a scripted model, and the contents that its last request added."""
    from trinity_workflow.workflow import CalculatorWorkflow

    from sharpen.compat.trinity import FormatConfig, ModelWrapper, Task
    from sharpen.placement.auxiliary.endpoint import Endpoint

    model = scripted(*replies)
    task = Task(
        raw_task=dict(ROW),
        format_args=FormatConfig(prompt_key="question", response_key="answer"),
        workflow_args={"guess_cost": 0.1},
    )

    async def whole():
        wrapper = ModelWrapper(Endpoint(base_url=model.base_url, name="m", api_key="k"), enable_history=True)
        async with wrapper.get_openai_async_client():
            return await CalculatorWorkflow(task=task, model=wrapper).run_async()

    return play(whole, models=[]), model.seen


def test_each_call_becomes_an_experience_with_the_reward(scripted, play):
    experiences, seen = run(scripted, play, tool_call("calculator", '{"expression": "12 * 3"}'), "#### 36")
    assert seen == ["36"]
    assert [experience.reward for experience in experiences] == [1.0, 1.0]
    assert experiences[-1].metrics == {"accuracy": 1.0, "guessed": 0.0}


@pytest.mark.parametrize(("answer", "reward"), [("#### 36", 0.9), ("#### 37", -0.1)])
def test_a_guess_costs(scripted, play, answer, reward):
    experiences, _ = run(scripted, play, answer)
    assert [experience.reward for experience in experiences] == [pytest.approx(reward)]


def test_two_steps_by_the_command_line(tmp_path, check_run, capsys):
    from types import SimpleNamespace

    from sharpen.cli.main import main

    options = {
        "checkpoint_root_dir": str(tmp_path),
        "train_dataset.total_steps": 2,
        "algorithm.batch_size": 2,
        "algorithm.group_size": 4,
        "evaluation.max_tasks": 2,
    }
    arguments = [argument for name, value in options.items() for argument in ("--set", f"{name}={value}")]
    assert main(["run", "--config", str(YAML), *arguments]) == 0
    assert "explorer.rollout_model.engine_num" in capsys.readouterr().out
    rollouts = check_run(SimpleNamespace(steps=2, run_dir=tmp_path / "TrinityWorkflow" / "calculator"))
    assert {len(rollout.calls) for rollout in rollouts} >= {1, 2}
    for rollout in rollouts:
        assert set(rollout.call_rewards) == {call.index for call in rollout.calls}
        assert rollout.reward == pytest.approx(rollout.metrics["accuracy"] - 0.1 * rollout.metrics["guessed"])
