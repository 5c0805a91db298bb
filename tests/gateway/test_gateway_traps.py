"""TRAPS rows 1 to 8 and 15 at the gateway: ids are never guessed, nothing is patched, nothing is padded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import generation, spaced_tokenizer, toy_tokenizer

from sharpen.types import CallStatus, Outcome

USER = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

PIECES = st.sampled_from(
    [
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "a",
        "name",
        "é",
        "日本",
        "🙂",
        "́",
        "{",
        '{"a":  1}',
        '"',
        "\\",
        "0",
        "<",
        "<tool",
        "<tool_call>",
        "</tool_call>",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "<think>",
        "</think>",
        '{"name": "add", "arguments": {"b":2 }}',
        "<|im",
        "#### 42",
    ]
)
SAID = st.one_of(
    st.lists(PIECES, max_size=12).map("".join),
    st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12),
    st.lists(st.integers(0, 325), min_size=1, max_size=12),
)


def ask(session: Any, messages: list[Any], **options: Any) -> Any:
    return session.model.sync_client.chat.completions.create(model="toy", messages=messages, **options).choices[0]


def talk(session: Any, turns: int, **options: Any) -> None:
    """A conversation that sends back the messages it got."""
    messages: list[Any] = list(USER)
    for _ in range(turns):
        message = ask(session, messages, **options).message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "go on"})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(said=st.lists(SAID, min_size=3, max_size=3), tools=st.booleans(), limit=st.sampled_from([4, 1000]))
def test_trap_01_trained_ids_are_the_sampled_ids(
    serve: Any, tokenizer: Any, said: list[Any], tools: bool, limit: int
) -> None:
    """Red when `History.prompt` tokenizes the whole text (`renderer.encode(text)`) where it extends a call."""
    given_ids: list[list[int]] = []

    def script(request: Any) -> Any:
        what = said[len(given_ids)]
        ids = tokenizer.encode(what, add_special_tokens=False) if isinstance(what, str) else what
        made = generation([*ids, tokenizer.eos_token_id], limit=limit)
        given_ids.append(made.ids.tolist())
        return made

    served = serve(script, reasoning_parser=None)
    session = served.open()
    talk(session, 3, **({"tools": [TOOL]} if tools else {}))
    calls = session.close()
    assert [call.sampled_ids_S.tolist() for call in calls] == given_ids
    for call, request in zip(calls, served.engine.requests, strict=True):
        assert call.prompt_ids_P.tolist() == request.prompt_ids.tolist()
        if call.parent is not None:
            parent = calls[call.parent]
            before = [*parent.prompt_ids_P.tolist(), *parent.sampled_ids_S.tolist()]
            assert call.prompt_ids_P.tolist()[: len(before)] == before
        elif call.index > 0 and not tools:  # whole text that the agent did not touch is always recognized
            text = tokenizer.decode(given_ids[call.index - 1][:-1])
            special = set(given_ids[call.index - 1][:-1]) & set(tokenizer.all_special_ids)
            assert "\ufffd" in tokenizer.decode(given_ids[call.index - 1]) or special or "\ufffd" in text


def test_trap_01_ids_that_no_tokenizer_would_choose_are_kept(serve: Any, tokenizer: Any) -> None:
    """As above, without chance: 'the name' spelled letter by letter. Red in the same way."""
    letters = tokenizer.convert_tokens_to_ids(list("theĠname"))
    assert letters != tokenizer.encode("the name", add_special_tokens=False)
    session = serve(lambda request: generation([*letters, tokenizer.eos_token_id])).open()
    talk(session, 2)
    first, second = session.close()
    assert second.parent == 0
    assert second.prompt_ids_P.tolist()[len(first.prompt_ids_P) :][: len(letters)] == letters


def test_trap_02_stripped_thinking_forks(serve: Any) -> None:
    """Red when `History.prompt` trusts the messages alone (drop the `startswith`)."""
    tokenizer = toy_tokenizer(keep_thinking=False)
    session = serve("<think>\nso\n</think>\n\nyes", tokenizer=tokenizer).open()
    talk(session, 2)
    first, second = session.close()
    assert second.parent is None
    assert "so" in tokenizer.decode(first.sampled_ids_S)
    rendered = "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(second.prompt_ids_P).endswith(rendered)
    kept = serve("<think>\nso\n</think>\n\nyes").open()
    talk(kept, 2)
    assert [call.parent for call in kept.close()] == [None, 0]


def test_trap_02_reasoning_dropped_by_the_agent_forks(serve: Any) -> None:
    """Red when `canonical` leaves the reasoning out and the `startswith` is dropped."""
    session = serve("<think>\nso\n</think>\n\nyes").open()
    ask(session, USER)
    ask(session, [*USER, {"role": "assistant", "content": "yes"}, *USER])
    assert [call.parent for call in session.close()] == [None, None]


def conversation(message: Any, arguments: str, *, call_id: str | None = None) -> list[Any]:
    call = message.tool_calls[0]
    again = {"id": call_id or call.id, "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": message.content, "tool_calls": [again]}
    return [*USER, answer, {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "3"}]


def test_trap_03_reserialised_tool_calls_are_what_was_sampled_or_fork(serve: Any) -> None:
    """The call's own id and the same value mean the sampled text; anything else forks. Red when `Memory.as_sampled`
    ignores the value, or `History.prompt` compares parsed arguments and drops the `startswith`."""
    served = serve('<tool_call>\n{"name": "add", "arguments": {"a":1,  "b": 2}}\n</tool_call>')
    session = served.open()
    message = ask(session, USER, tools=[TOOL]).message
    sent = message.tool_calls[0].function.arguments
    assert sent == '{"a":1,  "b": 2}'
    ask(session, conversation(message, sent), tools=[TOOL])
    written_anew = json.dumps(json.loads(sent))
    ask(session, conversation(message, written_anew), tools=[TOOL])
    ask(session, conversation(message, written_anew, call_id="call_of_another"), tools=[TOOL])
    ask(session, conversation(message, '{"a": 1, "b": 3}'), tools=[TOOL])
    calls = session.close()
    assert [call.parent for call in calls] == [None, 0, 0, None, None]
    assert calls[2].messages[1]["tool_calls"][0]["function"]["arguments"] == written_anew  # recorded as sent
    assert b'"a":1,  "b"' in served.engine.tokenizer.decode(calls[0].sampled_ids_S).encode()


@pytest.mark.parametrize(("arguments", "parent"), [('{"a": 1}', 0), ('{"a":1}', None)])
def test_trap_03_template_that_reserialises(serve: Any, arguments: str, parent: int | None) -> None:
    """A template that writes arguments with `tojson` gets them parsed; only its own spelling extends. Red as above."""
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    session = serve(text, tokenizer=toy_tokenizer(reparse=True)).open()
    talk(session, 2, tools=[TOOL])
    assert session.close()[1].parent == parent


def test_trap_04_separator_after_a_turn(serve: Any, tokenizer: Any) -> None:
    """Red when the rest is taken from the next turn's start (`.lstrip()` on it in `History.prompt`)."""
    served = serve("yes")
    session = served.open()
    talk(session, 2)
    first, second = session.close()
    rest = tokenizer.encode("\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    merged = [*first.prompt_ids_P.tolist(), *first.sampled_ids_S.tolist(), *rest]
    assert merged == served.engine.requests[1].prompt_ids.tolist() == second.prompt_ids_P.tolist()
    assert merged == tokenizer.encode(tokenizer.decode(merged), add_special_tokens=False)


def test_trap_05_several_tool_results_as_the_template_renders_them(serve: Any, tokenizer: Any) -> None:
    """Red when `render_message` turns the role `tool` into `user`."""
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    served = serve(f"{call}\n{call}")
    session = served.open()
    messages: list[Any] = list(USER)
    message = ask(session, messages, tools=[TOOL]).message
    messages.append(message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": str(i)} for i, call in enumerate(message.tool_calls)
    ]
    ask(session, messages, tools=[TOOL])
    second = session.close()[1]
    rendered = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert second.parent == 0
    assert tokenizer.decode(second.prompt_ids_P) == rendered
    assert rendered.count("<|im_start|>user") == 2


def test_trap_07_end_token_added_by_the_template_is_prompt(serve: Any, tokenizer: Any) -> None:
    """Red when `Entry.call` appends an end token to a truncated call's sampled ids."""
    session = serve("one two three four").open()
    talk(session, 2, max_tokens=3)
    first, second = session.close()
    assert first.finish_reason == "length"
    assert tokenizer.eos_token_id not in first.sampled_ids_S
    assert len(first.sampled_ids_S) == len(first.logprobs_S) == 3
    assert second.parent == 0
    rest = second.prompt_ids_P.tolist()[len(first.prompt_ids_P) + 3 :]
    assert rest[0] == tokenizer.eos_token_id


def test_trap_08_truncation_is_the_engines_word(serve: Any, tokenizer: Any) -> None:
    """Red when `finish_reason` is made from the presence of the end token or of tool calls."""
    ids = tokenizer.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>', add_special_tokens=False)
    cut = serve(lambda request: generation(ids, finish_reason="length")).open()
    assert ask(cut, USER, tools=[TOOL]).finish_reason == "length"
    stopped = serve(lambda request: generation(ids[:3], finish_reason="stop", text="x")).open()
    assert ask(stopped, USER).finish_reason == "stop"
    full = serve(lambda request: generation([*ids, tokenizer.eos_token_id], finish_reason="length")).open()
    assert ask(full, USER).finish_reason == "length"
    assert [session.close()[0].finish_reason for session in (cut, stopped, full)] == ["length", "stop", "length"]


BROKEN: list[dict[str, Any]] = [
    {"logprobs": np.array([-1.0, np.nan], np.float32)},
    {"logprobs": np.array([-1.0, -np.inf], np.float32)},
    {"logprobs": np.array([-1.0], np.float32)},
    {"logprobs": np.zeros(0, np.float32)},
    {"versions": np.array([0], np.int32)},
]


@pytest.mark.parametrize("fields", BROKEN)
def test_trap_15_calls_without_exact_logprobs_are_refused(serve: Any, fields: dict[str, Any]) -> None:
    """Red when `gateway._check` is skipped."""
    session = serve(lambda request: generation([5, 6], **fields)).open()
    with pytest.raises(openai.InternalServerError, match="CallError"):
        ask(session, USER)
    assert session.failure == Outcome.INFRASTRUCTURE
    (call,) = session.close()
    assert call.status == CallStatus.ABANDONED
    assert not call.trainable
    assert len(call.sampled_ids_S) == 0


def test_longest_parent_wins_and_branches_fork(serve: Any) -> None:
    session = serve("yes").open()
    talk(session, 3)
    ask(session, [*USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "another way"}])
    ask(session, [*USER, {"role": "assistant", "content": "no"}, {"role": "user", "content": "go on"}])
    assert [call.parent for call in session.close()] == [None, 0, 1, 0, None]
    assert session.metrics["forks"] == 1


def test_trap_04_tokenizers_that_write_a_beginning_differently(serve: Any) -> None:
    """Sentencepiece's manner: a space before a text's first word. Red when `encode_after` leaves the token out."""
    tokenizer = spaced_tokenizer()
    session = serve("yes", tokenizer=tokenizer).open()
    talk(session, 3)
    calls = session.close()
    assert [call.parent for call in calls] == [None, 0, 1]
    text = "ask: hello answer: yes</s>ask: go on answer: yes</s>ask: go on answer:"
    assert calls[2].prompt_ids_P.tolist() == tokenizer.encode(text, add_special_tokens=False)
