"""Two extensions of the request: `plain_text` (nothing is parsed, the call is named), `continue_final_message`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from scripted import END

from sharpen.types import CallStatus

THOUGHT = "<think>\nhm\n</think>\n\nyes"
ASK = [{"role": "user", "content": "?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def create(session: Any, messages: Any = ASK, **extra: Any) -> Any:
    options = {name: extra.pop(name) for name in ("n", "tools") if name in extra}
    return session.model.sync_client.chat.completions.create(
        model="toy", messages=messages, extra_body=extra, **options
    )


def test_plain_text_is_what_was_sampled(serve: Callable[..., Any]) -> None:
    session = serve(THOUGHT).open()
    assert create(session).choices[0].message.content == "yes"
    choices = create(session, plain_text=True, n=2).choices
    assert [choice.message.content for choice in choices] == [THOUGHT, THOUGHT]
    assert [choice.call_index for choice in choices] == [1, 2]
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    session = serve(call).open()
    message = create(session, plain_text=True, tools=TOOLS).choices[0].message
    assert (message.content, message.tool_calls) == (call, None)


def test_a_plain_answer_continues_the_same_sequence(serve: Callable[..., Any]) -> None:
    session = serve(THOUGHT).open()
    messages = [*ASK, {"role": "assistant", "content": create(session, plain_text=True).choices[0].message.content}]
    create(session, [*messages, *ASK], plain_text=True)
    calls = session.model.calls()
    assert [(call.parent, call.status) for call in calls] == [(None, CallStatus.USED), (0, CallStatus.USED)]


def test_the_final_message_is_continued(serve: Callable[..., Any]) -> None:
    served = serve("yes")
    session = served.open()
    messages = [*ASK, {"role": "assistant", "content": "I say"}]
    assert create(session, messages, continue_final_message=True).choices[0].message.content == "yes"
    assert session.model.prompt_text(0) == f"<|im_start|>user\n?{END}\n<|im_start|>assistant\nI say"
    with pytest.raises(openai.BadRequestError, match="'continue_final_message' needs an assistant message at the end"):
        create(session, continue_final_message=True)


def test_the_model_knows_its_version_and_whether_it_is_recorded(serve: Callable[..., Any]) -> None:
    served = serve("yes")
    served.engine.version = 7
    assert served.open().model.version == 7
    assert [served.open(record=record).model.recorded for record in (True, False)] == [True, False]
