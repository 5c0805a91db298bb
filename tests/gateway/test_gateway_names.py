"""Agents put names to messages (AgentScope to all of them): where the template shows none, the conversation goes on."""

from __future__ import annotations

from typing import Any

import pytest

USER: dict[str, Any] = {"role": "user", "content": "hello"}
SHOWS_NAMES = """{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ ' ' + message.name if message.name }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def parents(session: Any) -> list[int | None]:
    """The calls that a conversation of two calls extends, where the agent names what the model said."""
    create = session.model.sync_client.chat.completions.create
    said = create(model="toy", messages=[USER]).choices[0].message.content
    named = {"role": "assistant", "name": "friday", "content": [{"type": "text", "text": said}]}
    create(model="toy", messages=[USER, named, {"role": "user", "content": "go on"}])
    return [call.parent for call in session.close()]


def test_a_name_that_is_not_rendered_does_not_fork(serve: Any) -> None:
    assert parents(serve("hi").open()) == [None, 0]


def test_a_name_that_is_rendered_forks(serve: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", SHOWS_NAMES)
    assert parents(serve("hi").open()) == [None, None]
