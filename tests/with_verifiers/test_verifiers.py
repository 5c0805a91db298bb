"""verifiers as its package is: tasksets in a file, with an environment, with a tool server; a pairing of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replies import play

from sharpen import AlgorithmConfig, TunerModelConfig, tune
from sharpen.agent.environments.verifiers import Verifiers
from sharpen.config.public import EnvironmentConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.learning.experience.reading import read_groups
from sharpen.testing import check_environment

HERE = Path(__file__).parent / "tasksets"
REVERSE, GUESS, CALCULATOR = (str(HERE / name) for name in ("reverse_text.py", "guessing.py", "calculator_v1"))


def config(id_: str | None, args: Any = None, **more: Any) -> EnvironmentConfig:
    return EnvironmentConfig(type="verifiers", id=id_, args=args or {}, **more)


def test_one_turn_with_weighted_rewards() -> None:
    environment = Verifiers(config(REVERSE))
    row = environment.tasks("train")[0]
    assert row["task"]["prompt"].startswith("Reverse this: ")
    answer = row["task"]["answer"]
    output, (request,) = play(environment, dict(row), [answer])
    assert output.reward == 1.5
    assert output.metrics == {"turns": 1, "likeness": 1.0, "exact": 1.0, "length": len(answer)}
    assert [one["role"] for one in request["messages"]] == ["system", "user"]
    half, _ = play(environment, dict(row), ["?"])
    assert half.reward == half.metrics["likeness"] == half.metrics["exact"] == 0.0
    check_environment(Verifiers, config(REVERSE), ["a"])


def test_several_turns_of_an_environment_of_its_own() -> None:
    """A taskset that never ends is taken as far as asked."""
    given = config(GUESS, train_tasks=20, held_out_tasks=5)
    environment = Verifiers(given)
    assert [len(environment.tasks(split)) for split in ("train", "test")] == [20, 5]
    row = next(row for row in environment.tasks("train") if row["task"]["number"] == 7)
    output, requests = play(environment, dict(row), ["3", "7"])
    assert (output.reward, output.metrics) == (1.0, {"turns": 2, "won": 1.0})
    assert [one["content"] for one in requests[1]["messages"]] == [row["task"]["prompt"], "3", "No. Again!"]
    check_environment(Verifiers, given, ["1"])


def test_a_tool_server_of_the_task() -> None:
    environment = Verifiers(config(CALCULATOR))
    row = environment.tasks("train")[0]
    call = {"name": "calculator_multiply", "arguments": '{"a": 12, "b": 12}'}
    wrong = {"name": "calculator_divide", "arguments": "{}"}
    calls = [{"id": f"c{at}", "type": "function", "function": one} for at, one in enumerate((call, wrong))]
    output, requests = play(
        environment, dict(row), [{"content": None, "tool_calls": calls}, f"It is {row['task']['answer']}."]
    )
    assert output.reward == 1.0
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["calculator_multiply"]
    results = [one["content"] for one in requests[1]["messages"] if one["role"] == "tool"]
    assert results == ["144", "error: there is no tool 'calculator_divide'"]


def test_best_of_n_is_an_environment_of_its_package() -> None:
    environment = Verifiers(config(REVERSE, {"id": "best-of-n", "n": 2}))
    row = environment.tasks("train")[0]
    output, requests = play(environment, dict(row), [row["task"]["answer"], "?"])
    assert len(requests) == 2
    assert output.reward == 0.75
    assert output.metrics["pass_at_n"] == 1.0


def test_a_user_who_is_a_model_is_an_environment_of_its_package() -> None:
    """`user-sim`: the user knows the task and the agent does not; what the user says does not train."""
    environment = Verifiers(config(REVERSE, {"id": "user-sim"}))
    row = environment.tasks("train")[0]
    said = ["Reverse it, please.", row["task"]["answer"], "###DONE###"]
    output, requests = play(environment, dict(row), said)
    user, agent, _ = (request["messages"] for request in requests)
    assert row["task"]["prompt"] in user[0]["content"]
    assert [one["content"] for one in agent] == ["Say nothing else.", "Reverse it, please."]
    assert (output.reward, output.train) == (1.5, ["assistant"])
    assert output.metrics["assistant/user_turns"] == 2.0


def test_held_out_tasks_are_apart() -> None:
    environment = Verifiers(config(REVERSE, held_out_tasks=4))
    prompts = [{row["task"]["prompt"] for row in environment.tasks(split)} for split in ("train", "test")]
    assert [len(one) for one in prompts] == [8, 4]
    assert not prompts[0] & prompts[1]
    other = Verifiers(config(REVERSE, {"held_out": {"num_tasks": 5}}))
    assert [len(other.tasks(split)) for split in ("train", "test")] == [7, 5]


@pytest.mark.parametrize(
    ("id_", "args", "said"),
    [
        (None, {}, "environment.id is missing"),
        ("no-such-taskset", {}, "taskset 'no-such-taskset' not found"),
        (REVERSE, {"taskset": {"colour": 1}}, "colour"),
        (REVERSE, {"agnt": {}}, "agnt"),
    ],
)
def test_wrong_settings_are_one_sentence(id_: str | None, args: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Verifiers(config(id_, args))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_taskset_that_does_not_load() -> None:
    with pytest.raises(DatasetError, match="cannot be loaded: OSError: no such split"):
        Verifiers(config(REVERSE, {"taskset": {"fails": True}})).tasks("train")


def test_a_run_records_its_calls(tmp_path: Path, toy_model_dir: Path) -> None:
    """By the gateway: what verifiers passes on is recorded with its tokens, and trains."""
    result = tune(
        environment=config(GUESS, train_tasks=4, held_out_tasks=2),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=512, max_tokens=4),
        algorithm=AlgorithmConfig(batch_size=2, group_size=2),
        settings={"checkpoint_root_dir": str(tmp_path), "name": "run", "train_dataset.total_steps": 1},
    )
    rollouts = [rollout for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts]
    assert {rollout.outcome for rollout in rollouts} == {"ok"}, [rollout.error for rollout in rollouts]
    assert {len(rollout.calls) for rollout in rollouts} <= {1, 2, 3, 4}
