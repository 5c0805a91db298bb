"""How `sharpen show` tells the conversations of a rollout apart: a side call, a sub-agent, a compacted history."""

from experience_builders import make_call

from sharpen.cli.page import conversations, relation

SYSTEM = {"role": "system", "content": "You mend files."}
QUESTION = {
    "role": "user",
    "content": [{"type": "text", "text": "Write 5"}, {"type": "text", "text": "into answer.txt."}],
}
TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("bash", "task"))


def said(text):
    return {"role": "assistant", "content": text}


def result(text):
    return {"role": "tool", "content": text, "tool_call_id": "1"}


def a_call(index, parent, messages, tools=TOOLS):
    return make_call(index, [1, 2], [3], parent, messages=tuple(messages), tools=tools)


def a_rollout():
    """Main conversation 0, 3, 5; a title 1; a sub-agent 2, 4; a compacted history 6; what was said anew 7."""
    title = ({"role": "system", "content": "Write a title."}, {"role": "user", "content": "Title " * 40})
    agent = ({"role": "system", "content": "You search."}, {"role": "user", "content": "Find five."})
    first = (SYSTEM, QUESTION)
    second = (*first, said("I look."), result("found"))
    third = (*second, said("I write."), result("ok"))
    compact = (SYSTEM, {"role": "user", "content": "So far: 5 is written. Go on."})
    return [
        a_call(0, None, first),
        a_call(1, None, title, ()),
        a_call(2, None, agent, TOOLS[:1]),
        a_call(3, 0, second),
        a_call(4, 2, (*agent, said("I grep."), result("5"))),
        a_call(5, 3, third),
        a_call(6, None, compact),
        a_call(7, None, (*compact, said("Written as it was not sampled."), result("ok"))),
    ]


def test_each_call_says_what_it_goes_on_from():
    calls = a_rollout()
    assert [relation(calls, call) for call in calls] == [
        "",
        "a separate conversation: another system prompt, no tools",
        "a separate conversation: another system prompt, tools bash",
        "continues call 0",
        "continues call 2",
        "continues call 3",
        "a separate conversation: system prompt and tools of call 0, another history",
        "continues call 6 in words, not token by token: a sequence of its own",
    ]


def test_the_conversations_of_a_rollout():
    found = conversations(a_rollout())
    assert [one.calls for one in found] == [(0, 3, 5), (1,), (2, 4), (6, 7)]
    assert [one.tools for one in found] == [("bash", "task"), (), ("bash",), ("bash", "task")]
    assert found[0].asked == "Write 5 into answer.txt."
    assert found[1].asked.startswith("...")
    assert len(found[1].asked) == 60


def test_a_call_that_goes_on_at_once_says_nothing_and_one_that_is_repeated_does():
    first = a_call(0, None, (SYSTEM, QUESTION))
    second = a_call(1, 0, (SYSTEM, QUESTION, said("x"), result("y")))
    again = a_call(2, None, second.messages)
    calls = [first, second, again]
    assert [relation(calls, call) for call in calls] == ["", "", "asks the same as call 1"]
    assert len(conversations(calls)) == 1
