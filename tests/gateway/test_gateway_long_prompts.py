"""Long prompts are one rollout's own trouble: they are made beside the serving loop, in the same ids."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import openai
import pytest
from scripted import eventually

from sharpen.gateway.gateway import LONG
from sharpen.gateway.render import LONG_TEXT, MAX_LONG_KEPT, SHORT_TEXT, Renderer
from sharpen.types import CallStatus

PATIENCE_S = 120
LINES = "a line of text, and 12 more.\n" * (LONG // 20)


class Waiting:
    """A tokenizer whose template needs a long prompt's author to wait until somebody else has been answered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        if any(message["content"] == LINES for message in messages):
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S), "nobody else was answered"
        return str(self._tokenizer.apply_chat_template(messages, **options))


def ask(session: Any, content: str) -> Any:
    return session.model.sync_client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": content}], max_tokens=8
    )


def test_others_are_answered_while_a_long_prompt_is_made(serve: Any, tokenizer: Any) -> None:
    """Red when `Gateway._beside` makes every prompt on the serving loop."""
    waiting = Waiting(tokenizer)
    served = serve("hi", tokenizer=waiting, max_model_len=1 << 20)
    long, other = served.open("g/0"), served.open("g/1")
    thread = threading.Thread(target=ask, args=(long, LINES))
    thread.start()
    assert waiting.begun.wait(PATIENCE_S)
    assert ask(other, "hello").choices[0].message.content == "hi"
    waiting.go_on.set()
    thread.join(PATIENCE_S)
    (call,) = long.close()
    assert call.prompt_ids_P.tolist() == tokenizer.apply_chat_template(
        call.messages, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("piece", ["<|im_end|>a", "  \n", "é漢🙂", "17 ", "a"])
def test_long_texts_have_the_same_ids(tokenizer: Any, piece: str) -> None:
    text = piece * (LONG_TEXT // len(piece) + 7)
    assert len(text) > LONG_TEXT
    expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    renderer = Renderer(tokenizer)
    assert renderer.encode(text).tolist() == expected
    assert renderer.encode_raw(text).tolist() == tokenizer.backend_tokenizer.encode(text).ids


def test_a_long_request_that_is_too_long_is_the_rollouts_own_overflow(serve: Any) -> None:
    session = serve("hi").open()
    with pytest.raises(Exception, match="maximum context length is 4096"):
        ask(session, LINES * 4)
    assert session.failure is not None
    assert session.close() == ()


def test_few_long_texts_are_kept(tokenizer: Any) -> None:
    """Red with one cache for all lengths: a thousand long prompts, none of which comes again, took hundreds of MB."""
    renderer = Renderer(tokenizer)
    made = [weakref.ref(renderer.encode(f"{number} " * SHORT_TEXT)) for number in range(MAX_LONG_KEPT + 5)]
    gc.collect()
    assert sum(ids() is not None for ids in made) == MAX_LONG_KEPT
    assert renderer.encode("short") is renderer.encode("short")


def test_a_short_request_that_continues_a_long_answer_is_long(serve: Any, tokenizer: Any) -> None:
    """By its id alone. Red when `Gateway._beside` goes by the length of the body."""
    waiting = Waiting(tokenizer)
    served = serve("hi", tokenizer=waiting, max_model_len=1 << 20)
    session, other = served.open("g/0"), served.open("g/1")
    waiting.go_on.set()
    create = session.model.sync_client.responses.create
    first = create(model="toy", input=LINES)
    waiting.go_on.clear()
    waiting.begun.clear()
    again = {"model": "toy", "input": "again", "previous_response_id": first.id}
    thread = threading.Thread(target=create, kwargs=again)
    thread.start()
    assert waiting.begun.wait(PATIENCE_S)
    assert ask(other, "hello").choices[0].message.content == "hi"
    waiting.go_on.set()
    thread.join(PATIENCE_S)
    assert [call.parent for call in session.close()] == [None, 0]


def test_a_call_that_is_cancelled_while_its_prompt_is_made_is_what_its_retry_repeats(
    serve: Any, tokenizer: Any
) -> None:
    """Not an equal call before it, which was answered. Red when `Gateway._call` does not note it."""
    waiting = Waiting(tokenizer)
    waiting.go_on.set()
    session = serve("hi", tokenizer=waiting, max_model_len=1 << 20).open()

    async def main() -> None:
        client = openai.AsyncOpenAI(base_url=session.model.base_url, api_key=session.model.api_key, max_retries=0)
        create = client.chat.completions.create
        asked: Any = {"model": "toy", "messages": [{"role": "user", "content": LINES}], "max_tokens": 8}
        await create(**asked)
        waiting.go_on.clear()
        waiting.begun.clear()
        cut = asyncio.create_task(create(**asked))
        assert await asyncio.to_thread(waiting.begun.wait, PATIENCE_S)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        await asyncio.to_thread(eventually, lambda: not session.arrival.locked())
        waiting.go_on.set()
        await create(**asked, extra_headers={"x-stainless-retry-count": "1"})
        await client.close()

    asyncio.run(main())
    assert [call.status for call in session.close()] == [CallStatus.USED, CallStatus.USED]
