"""A run whose agent asks for JSON of a schema: it trains, engine and trainer agree, and `certify` holds."""

import json
import shutil
import sqlite3
from typing import Literal

import pytest
from pydantic import BaseModel

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.learning.experience.reading import read_groups


class Pick(BaseModel):
    city: Literal["Bern", "Oslo", "Rome"]
    sure: bool


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["map", "sky"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


FORCED = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


async def pick(task, model):
    """A tool call that has to be made, then an answer of a schema."""
    create, messages = model.client.chat.completions, [{"role": "user", "content": task["question"]}]
    said = await create.create(model=model.name, messages=messages, **FORCED)
    call = said.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["at"] in ("map", "sky")
    messages += [said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "seen"}]
    answer = await create.parse(model=model.name, messages=messages, response_format=Pick)
    return WorkflowOutput(reward=float(answer.choices[0].message.parsed.city == "Oslo"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_model_dir, toy_dataset):
    """Two steps, with a reference and two epochs, so that every kind of score is needed under the mask."""
    return tune(
        workflow_func=pick,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(
            model_path=str(toy_model_dir), max_model_len=512, max_tokens=120, tool_call_parser="qwen3_coder"
        ),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-2, save_interval_steps=1
        ),
        settings={
            "checkpoint_root_dir": str(tmp_path_factory.mktemp("constrained")),
            "trainer.epochs": 2,
            "trainer.keep_checkpoints": 10,
            "loss.kl": "k3",
            "loss.kl_coef": 0.01,
            "evaluation.before_and_after": False,
            "certificate.retrain": "off",
        },
    ).run_dir


def test_the_updates_made_once_more_under_the_masks_give_the_weights(finished):
    found = retrain(finished)
    assert not found.problems
    assert not found.not_repeated
    assert len(found.repeated) == 2


def test_it_trains_and_certify_holds(finished):
    found = certify(finished)
    assert found.holds, found.problems
    assert found.logprob_gaps.max < 1e-4
    assert found.outcomes == {"ok": 16}
    assert found.truncated_tokens == 0
    calls = [call for group in read_groups(finished / "run.db") for one in group.rollouts for call in one.calls]
    assert {call.constraint.origin for call in calls} == {"tool_choice", "response_format"}
    assert len({call.constraint.grammar for call in calls}) == 2


@pytest.fixture
def spoiled(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def test_a_record_that_lost_its_constraints_is_found(spoiled):
    """Without them the tokens have other logprobs, and what the trainer was given is not what is recorded."""
    with sqlite3.connect(spoiled / "run.db") as connection:
        assert connection.execute("DELETE FROM call_constraints").rowcount > 0
    assert any("trainer and engine differ" in problem for problem in certify(spoiled).problems)
    assert not certify(spoiled, logprobs=False).holds


def test_a_token_that_its_constraint_forbids_is_found(spoiled):
    with sqlite3.connect(spoiled / "run.db") as connection:
        other = json.dumps({"grammar": 'start: "no"', "origin": "response_format"})
        connection.execute(
            "UPDATE texts SET json = ? WHERE json LIKE '%response_format%' AND json LIKE '%grammar%'", (other,)
        )
    problems = certify(spoiled).problems
    assert any("call 1" in one and "not allowed" in one and "response_format" in one for one in problems), problems
