"""Rollouts as rows of a table for a monitor."""

from experience_builders import make_call, make_group, make_rollout, two_turns

from sharpen.agent.transcript import CONVERSATION, rows_of
from sharpen.types import Outcome


def test_a_rollout_is_a_row_with_its_task_its_conversation_and_its_result() -> None:
    said = ({"role": "user", "content": "2+2?"},)
    answered = make_call(0, [1, 2], [3, 4], messages=said, response={"role": "assistant", "content": "4"})
    failed = make_rollout([], None, index=1, outcome=Outcome.JUDGE_ERROR, error="KeyError: 'x'")
    first, second = rows_of([make_group([make_rollout([answered]), failed])], 9)
    assert first == {
        "rollout": "g/0",
        "task": "question: 2+2?",
        "conversation": "user: 2+2?\n\nassistant: 4",
        "reward": 1.0,
        "outcome": "ok",
        "calls": 1.0,
        "tokens": 2.0,
        "error": "",
    }
    assert (second["reward"], second["outcome"], second["error"]) == (None, "judge_error", "KeyError: 'x'")
    assert list(first) == list(second)


def test_no_more_rows_than_asked_for_and_no_longer_ones() -> None:
    groups = [make_group([two_turns(group=name, index=number) for number in range(3)], name) for name in "ab"]
    assert [row["rollout"] for row in rows_of(groups, 4)] == ["a/0", "a/1", "a/2", "b/0"]
    assert rows_of(groups, 0) == []
    long = make_call(0, [1], [2], response={"role": "assistant", "content": "x" * 50_000 + "the end"})
    (row,) = rows_of([make_group([make_rollout([long])])], 1)
    text = str(row["conversation"])
    assert (len(text), text[:3], text[-7:]) == (CONVERSATION, "...", "the end")
