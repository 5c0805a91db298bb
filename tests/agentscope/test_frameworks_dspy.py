"""A DSPy program on our model, over HTTP: what its response cache does to rollouts and to an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from framework_checks import check_records

from sharpen import WorkflowOutput
from sharpen.config.run import RunConfig
from sharpen.run.evaluation import Evaluator
from sharpen.types import Outcome, Task

TASK = {"question": "2+3", "answer": "5"}
ANSWER = "[[ ## answer ## ]]\n5\n\n[[ ## completed ## ]]"


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path) -> Iterator[None]:
    """DSPy's cache as users have it, on the disk too, but empty."""
    before = dspy.cache
    dspy.configure_cache(disk_cache_dir=str(tmp_path / "cache"))
    yield
    dspy.cache = before


def program(cache: bool) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        lm = dspy.LM(f"openai/{model.name}", api_base=model.base_url, api_key=model.api_key, cache=cache, num_retries=0)
        with dspy.context(lm=lm):
            found = await dspy.Predict("question -> answer").acall(question=task["question"])
        return WorkflowOutput(reward=float(found.answer == task["answer"]), response=found.answer)

    return workflow


def test_without_its_cache_every_rollout_calls_the_model(rollouts: Any) -> None:
    (group,) = rollouts(ANSWER).run(program(False), tasks=[TASK], group_size=4)
    assert [(one.outcome, one.reward) for one in group.rollouts] == [(Outcome.OK, 1.0)] * 4, group.rollouts[0].error
    assert [len(rollout.calls) for rollout in group.rollouts] == [1] * 4


def evaluate(served: Any, workflow: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    tasks = [Task(id=f"test/{n}", index=n, row={"question": f"{n}+3", "answer": "5"}) for n in range(4)]
    with served.runner(workflow) as runner:
        evaluator = Evaluator(
            config=RunConfig.model_validate(
                {"train_dataset": {"path": "d"}, "model": {"model_path": "m", "max_model_len": 64}}
            ),
            runner=runner,
            modes={"sampled": served.open},
            tasks=tasks,
            further={},
            progress=lambda *_: None,
            message=said.append,
        )
        evaluator.evaluate(0, name="before", with_further=False)
        return evaluator.evaluate(1, name="after", with_further=False), said


def test_answers_from_its_cache_are_no_result(rollouts: Any) -> None:
    """Red while the second evaluation gave the first one's answers as the trained model's: +0.000 [+0.000, +0.000]."""
    found, said = evaluate(rollouts(ANSWER), program(True))
    assert found.without_calls == {"sampled": 4}
    assert "made no model call" in found.no_result
    assert any(line.startswith("evaluating after: no result: sampled: 4 of 4") for line in said), said


def test_without_its_cache_there_is_a_result(rollouts: Any) -> None:
    found, said = evaluate(rollouts(ANSWER), program(False))
    assert (found.without_calls, found.no_result) == ({"sampled": 0}, ""), said


def test_an_answer_that_its_adapter_cannot_parse_is_the_models_failure(rollouts: Any) -> None:
    (group,) = rollouts("no fields at all").run(program(False), tasks=[TASK], max_attempts=3)
    (rollout,) = group.rollouts
    assert rollout.outcome == Outcome.UNUSABLE_ANSWER, rollout.error
    assert group.attempts == ()


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def step(thought: str, tool: str, arguments: str) -> str:
    """A step of its ReAct agent, as its adapter reads it."""
    fields = {"next_thought": thought, "next_tool_name": tool, "next_tool_args": arguments}
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items()) + "\n\n[[ ## completed ## ]]"


STEPS = (
    step("I add.", "add", '{"a": 2, "b": 3}'),
    step("I know it.", "finish", "{}"),
    f"[[ ## reasoning ## ]]\nAdded.\n\n{ANSWER}",
)


def agent(provider: str, *, stream: bool, **options: Any) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        url = model.base_url.removesuffix("/v1") if provider == "anthropic" else model.base_url
        lm = dspy.LM(
            f"{provider}/{model.name}", api_base=url, api_key=model.api_key, cache=False, num_retries=0, **options
        )
        react = dspy.ReAct("question -> answer", tools=[add])
        with dspy.context(lm=lm):
            if stream:
                said = [one async for one in dspy.streamify(react)(question=task["question"])]
                found = next(one for one in said if isinstance(one, dspy.Prediction))
            else:
                found = await react.acall(question=task["question"])
        return WorkflowOutput(reward=float(found.answer == task["answer"]), response=found.answer)

    return workflow


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize(
    ("provider", "options"),
    [("openai", {}), ("openai", {"model_type": "responses"}), ("anthropic", {})],
    ids=["chat", "responses", "messages"],
)
def test_each_step_of_its_agent_is_a_sequence_of_its_own(
    rollouts: Any, provider: str, options: dict[str, str], stream: bool
) -> None:
    """It writes what was done so far anew, as text of its own, before each step."""
    said = iter(STEPS)
    served = rollouts(lambda prompt: next(said))
    (rollout,) = check_records(served.engine, served.run(agent(provider, stream=stream, **options), tasks=[TASK]))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert [call.parent for call in rollout.calls] == [None] * 3
