"""Experiences that a workflow constructs, as Trinity's documents do: they stand for recorded calls, or are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from trinity_serving import MakePlace, talking_server

from sharpen.compat.trinity import Experience, ModelWrapper, MultiTurnWorkflow, Workflow
from sharpen.compat.trinity.adapter import workflow_function
from sharpen.compat.trinity.task import TasksetConfig
from sharpen.errors import ConfigError
from sharpen.placement.auxiliary.endpoint import Endpoint
from sharpen.types import CallStatus


class Guide(Workflow):
    """As the guide writes it: an experience made of each answer's tokens."""

    can_repeat = True

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times = repeat_times

    def run(self):
        answers = self.model.chat([{"role": "user", "content": "?"}], n=self.repeat_times)
        return [
            Experience(
                tokens=answer.tokens,
                prompt_length=answer.prompt_length,
                reward=float(len(answer.response_text)),
                logprobs=answer.logprobs,
                metrics={"length": len(answer.response_text)},
            )
            for answer in answers
        ]


def test_the_guide_s_experiences_stand_for_the_recorded_calls(make_place: MakePlace):
    texts = iter(["a", "bb", "a"])  # two answers of the same tokens
    (group,) = make_place(lambda prompt: next(texts)).run(Guide, group_size=3)
    assert sorted(rollout.reward for rollout in group.rollouts) == [1.0, 1.0, 2.0]
    for rollout in group.rollouts:
        (call,) = rollout.calls
        assert call.status == CallStatus.USED
        assert rollout.reward == len(call.response["content"]) == rollout.metrics["length"]


class Rebuilt(MultiTurnWorkflow):
    """A conversation of two turns, made anew of the parts that its own experience shows."""

    def run(self):
        memory: list[dict[str, Any]] = []
        for turn in range(2):
            memory.append({"role": "user", "content": f"turn {turn}"})
            (answer,) = self.model.chat(memory)
            memory.append({"role": "assistant", "content": answer.response_text})
        whole = self.process_messages_to_experience(memory, 0.5)
        given = {"tokens": whole.tokens, "prompt_length": whole.prompt_length, "logprobs": whole.logprobs}
        given |= {"action_mask": whole.action_mask, "info": {"step_reward": 0.5}}
        changed = {
            "mask": {"action_mask": torch.ones_like(whole.action_mask)},
            "logprobs": {"logprobs": whole.logprobs - 1},
            "length": {"prompt_length": whole.prompt_length + 1},
            "out": {"action_mask": torch.zeros_like(whole.action_mask)},
            "last": {"prompt_length": answer.prompt_length, "logprobs": answer.logprobs, "action_mask": None},
        }
        return [Experience(reward=0.5, **given | changed.get(self.task.workflow_args.get("change", ""), {}))]


def test_a_conversation_made_anew(make_place: MakePlace):
    rollout = make_place("yes").one(Rebuilt)
    assert (rollout.error, rollout.reward, dict(rollout.call_rewards)) == (None, 0.5, {0: 0.5, 1: 0.5})
    assert dict(rollout.step_rewards) == {1: 0.5}
    out = make_place("yes").one(Rebuilt, workflow_args={"change": "out"})
    assert {call.status for call in out.calls} == {CallStatus.LEFT_OUT}
    last = make_place("yes").one(Rebuilt, workflow_args={"change": "last"})
    assert [call.status for call in last.calls] == [CallStatus.LEFT_OUT, CallStatus.USED]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("mask", "whose action_mask is a part of what was sampled"),
        ("logprobs", "with logprobs other than the recorded ones"),
        ("length", "with prompt_length .*, but the answers in its tokens begin at"),
    ],
)
def test_what_contradicts_the_record_stops_the_run(make_place: MakePlace, change: str, words: str):
    with pytest.raises(ConfigError, match=words):
        make_place("yes").run(Rebuilt, workflow_args={"change": change})


def test_where_an_endpoint_answers_there_are_no_tokens():
    with talking_server() as url:
        model = Endpoint(base_url=url, name="m", api_key="k")
        run = workflow_function(Guide, TasksetConfig(), {})
        (result,) = asyncio.run(run({"prompt": "?"}, model, {}))
        assert (result.reward, result.call_rewards) == (3.0, None)
        with pytest.raises(ConfigError, match="needs the model's tokenizer"):
            asyncio.run(ModelWrapper(model, enable_history=True).get_message_token_len([]))
