"""Which answers made a conversation: what Trinity's multi-turn workflows ask with their list of messages.

In: the messages, with the assistant's own among them, and the rollout's answers so far. Out: the answers that gave
those assistant messages. Nothing is tokenized again: the tokens are those of the recorded calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.agent.tasks.images import with_images
from sharpen.compat.trinity.experience import Answer
from sharpen.errors import ConfigError
from sharpen.gateway.history import Canonical, canonical
from sharpen.gateway.images import decoded, reference
from sharpen.gateway.protocols.chat import check_recorded
from sharpen.gateway.requests import ApiError, render_message
from sharpen.types import PROMPT_ROLE, CallStatus, Picture


def answers_in(
    messages: Sequence[Mapping[str, Any]], answers: Sequence[Answer], told: Sequence[Answer] = ()
) -> tuple[Answer, ...]:
    """The answers that gave the conversation's assistant messages, in order.

    An answer gave the assistant message at position k if it was asked with the messages before k. Where several were
    (n > 1), the one that says what the message says, and of those that say the same one that no earlier conversation
    `told`: the same conversation may be held several times. Assistant messages that nobody was asked for (examples in
    the prompt) are context. Raises `ConfigError` if no answer made any part of the conversation, or if it cannot be
    told which one did.
    """
    said = [_canonical(message, position) for position, message in enumerate(messages)]
    asked = [
        (tuple(_canonical(message, position) for position, message in enumerate(answer.messages)), answer)
        for answer in answers
        if (answer.call is None or answer.call.status == CallStatus.USED) and answer.messages[0]["role"] != PROMPT_ROLE
    ]
    found: list[Answer] = []
    for position, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = tuple(said[:position])
        candidates = [answer for prompt, answer in asked if prompt == before]
        candidates.sort(key=lambda answer: any(answer is one for one in told))
        if len(candidates) > 1:
            candidates = [answer for answer in candidates if answer.text.strip() == said[position][1].strip()]
            if not candidates:
                raise ConfigError(
                    f"messages[{position}] is none of the answers that the model gave there: put exp.response_text "
                    "into the conversation as it came"
                )
        found += candidates[:1]
    if not found:
        raise ConfigError(
            f"none of the rollout's {len(answers)} calls made this conversation of {len(messages)} messages: each "
            "assistant message must be the answer to exactly the messages before it"
        )
    return tuple(found)


def _canonical(message: Mapping[str, Any], position: int) -> Canonical:
    try:
        given = _with_references(message)
        check_recorded(given, position)
        return canonical(render_message(given))
    except (ApiError, ValueError) as error:
        raise ConfigError(f"the conversation is not one of chat messages: {error}") from error


def _with_references(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as it is recorded: with references in place of its images."""
    (message,) = with_images([message], ())
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": list(map(_referenced, message["content"]))}


def _referenced(part: Any) -> Any:
    source = part.get("image_url") if isinstance(part, Mapping) else None
    url = source.get("url") if isinstance(source, Mapping) else source
    if not isinstance(url, str) or url[:5].lower() != "data:":
        return part
    return reference(Picture.of(decoded(url.partition(",")[2])).sha256)
