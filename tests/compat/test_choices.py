"""Trap 38: answers that the agent did not use, of a request for several, are not trained with the rollout's reward."""

import logging
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from trinity_serving import MakePlace

from sharpen import WorkflowOutput
from sharpen.compat.trinity import Workflow
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.merge import merge
from sharpen.learning.experience.reading import read_groups
from sharpen.types import CallStatus, Rollout

USED, UNUSED, LEFT_OUT = CallStatus.USED, CallStatus.UNUSED, CallStatus.LEFT_OUT
ASK = {"role": "user", "content": "?"}


def numbered() -> Callable[[str], str]:
    """A model whose answers are `answer 0`, `answer 1`, ..."""
    numbers = count()
    return lambda prompt: f"answer {next(numbers)}"


async def choices_of(model: Any, *messages: Any, n: int) -> list[Any]:
    reply = await model.client.chat.completions.create(model=model.name, messages=[ASK, *messages], n=n)
    return [choice.message for choice in reply.choices]


async def goes_on(task: Any, model: Any) -> WorkflowOutput:
    """Chooses the second of three, and goes on from it with one that it returns among two."""
    chosen = (await choices_of(model, n=3))[1]
    held = {
        "role": "assistant",
        "content": f" {chosen.content}\n",
    }  # not to the letter: no later call continues its ids
    last = await choices_of(model, held, ASK, n=2)
    return WorkflowOutput(reward=1.0, response=last[0].content)


async def returns_a_message(task: Any, model: Any) -> WorkflowOutput:
    await choices_of(model, n=1)
    return WorkflowOutput(reward=1.0, response=(await choices_of(model, n=2))[1])


async def votes(task: Any, model: Any) -> float:
    await choices_of(model, n=3)
    return 1.0


class Returns(Workflow):
    """A workflow of Trinity's says itself which ones take part."""

    def run(self) -> Any:
        exps = self.model.chat([ASK], n=3)
        exps[2].reward = 1.0
        return [exps[2]]


def status(rollout: Rollout) -> list[CallStatus]:
    assert rollout.error is None
    return [call.status for call in rollout.calls]


def test_the_choice_that_the_agent_went_on_with_is_trained_alone(make_place: MakePlace, tmp_path: Any) -> None:
    """Red when a delivered call is a used one: all five trained with the reward of one answer each."""
    place = make_place(numbered())
    (group,) = place.run(goes_on)
    (rollout,) = group.rollouts
    assert status(rollout) == [UNUSED, USED, UNUSED, USED, UNUSED]
    assert [call.request for call in rollout.calls] == [0, 0, 0, 3, 3]
    trained = {int(c) for experience in merge(rollout) for c in experience.calls_T if c >= 0}
    assert trained == {1, 3}
    assert rollout.answered
    with Journal(tmp_path / "run.db") as journal:
        journal.add(group)
    (found,) = read_groups(tmp_path / "run.db")
    assert [(call.status, call.request) for call in found.rollouts[0].calls] == [
        (call.status, call.request) for call in rollout.calls
    ]


def test_a_returned_message_shows_which_one_was_used(make_place: MakePlace) -> None:
    rollout = make_place(numbered()).one(returns_a_message)
    assert status(rollout) == [USED, UNUSED, USED]
    assert [call.request for call in rollout.calls] == [None, 1, 1]


def test_where_nothing_tells_none_is_trained_and_that_is_said_once(make_place: MakePlace, caplog: Any) -> None:
    place = make_place(numbered())
    with caplog.at_level(logging.WARNING, "sharpen.rollout"):
        (group,) = place.run(votes, group_size=2)
    assert [status(rollout) for rollout in group.rollouts] == [[UNUSED] * 3] * 2
    assert all(rollout.answered for rollout in group.rollouts)  # the model's answers earned the reward all the same
    (said,) = caplog.messages
    assert "3 choices" in said
    assert "set rollout.choices: all" in said


def test_an_agent_that_votes_trains_all_of_them(make_place: MakePlace) -> None:
    assert status(make_place(numbered()).one(votes, choices="all")) == [USED] * 3


def test_a_workflow_of_trinitys_says_which_ones_itself(make_place: MakePlace) -> None:
    assert status(make_place(numbered()).one(Returns)) == [LEFT_OUT, LEFT_OUT, USED]


@pytest.mark.parametrize("answer", ["answer 0", "something else"])
def test_of_choices_that_say_the_same_one_is_used(make_place: MakePlace, answer: str) -> None:
    async def echo(task: Any, model: Any) -> WorkflowOutput:
        await choices_of(model, n=2)
        return WorkflowOutput(reward=1.0, response=answer)

    found = status(make_place("answer 0").one(echo))
    assert found == ([USED, UNUSED] if answer == "answer 0" else [UNUSED, UNUSED])


def test_a_choice_whose_ids_a_later_call_continues_is_used(make_place: MakePlace) -> None:
    async def word_for_word(task: Any, model: Any) -> float:
        chosen = (await choices_of(model, n=2))[0]
        await choices_of(model, {"role": "assistant", "content": chosen.content}, ASK, n=1)
        return 1.0

    rollout = make_place(numbered()).one(word_for_word)
    assert status(rollout) == [USED, UNUSED, USED]
    assert rollout.calls[2].parent == 0
