"""Images in requests: read by the model's own processor, recorded by their content, refused in the vendor's words."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from picture_toys import ENTITIES, bomb, draw, make_seeing_checkpoint, moving, with_scans
from PIL import Image
from scripted import toy_tokenizer
from transformers import AutoConfig, AutoTokenizer

from sharpen.errors import ConfigError
from sharpen.gateway.images import MAX_IMAGE_BYTES, MAX_IMAGES, Album
from sharpen.models.images import eyes_of
from sharpen.types import Outcome, Picture

CHAT, RESPONSES, MESSAGES = "/chat/completions", "/responses", "/messages"
PROTOCOLS = (CHAT, RESPONSES, MESSAGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Any) -> Any:
    return make_seeing_checkpoint("qwen3_vl", tmp_path_factory.mktemp("seeing"), toy_model_dir)


@pytest.fixture(scope="module")
def eyes(folder: Any) -> Any:
    return eyes_of(folder, AutoConfig.from_pretrained(folder))


@pytest.fixture
def seeing(serve: Any, folder: Any, eyes: Any) -> Any:
    """Serve answers to a model that looks at images."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda answer="two", **options: serve(answer, tokenizer=tokenizer, album=Album(eyes), **options)


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def part(path: str, content: bytes) -> dict[str, Any]:
    """An image as a protocol has it, with what changes nothing here."""
    encoded = base64.b64encode(content).decode()
    return {
        CHAT: {"type": "image_url", "image_url": {"url": data_url(content), "detail": "high"}},
        RESPONSES: {"type": "input_image", "image_url": data_url(content), "detail": "low"},
        MESSAGES: {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": encoded},
            "cache_control": {"type": "ephemeral"},
        },
    }[path]


def body(path: str, content: Any, *before: Any) -> dict[str, Any]:
    """A request with this content in its last message."""
    kind = "input_text" if path == RESPONSES else "text"
    parts = [{"type": kind, "text": one} if isinstance(one, str) else one for one in content]
    messages = [*before, {"role": "user", "content": parts}]
    limit = {} if path != MESSAGES else {"max_tokens": 99}
    return {"model": "toy", "input" if path == RESPONSES else "messages": messages, **limit}


def post(session: Any, path: str, content: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {session.model.api_key}"}
    return httpx.post(f"{session.model.base_url}{path}", headers=headers, json=content, timeout=600)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_an_image_is_read_as_the_model_s_processor_does(seeing: Any, eyes: Any, path: str) -> None:
    served = seeing()
    session, picture = served.open(), draw(1, 40, 24)
    reply = post(session, path, body(path, ["how many?", part(path, picture.data), "now"]))
    assert (reply.status_code, session.failure) == (200, None)
    text = (
        "<|im_start|>user\nhow many?<|vision_start|><|image_pad|><|vision_end|>now<|im_end|>\n<|im_start|>assistant\n"
    )
    ids, spans = eyes.expand(text, [picture])
    (call,), (request,) = session.close(), served.engine.requests
    assert call.prompt_ids_P.tolist() == request.prompt_ids.tolist() == ids.tolist()
    assert call.pictures == request.pictures == spans
    assert call.pictures[0].picture.data == picture.data
    assert call.messages[0]["content"] == [
        {"type": "text", "text": "how many?"},
        {"type": "image_url", "image_url": {"url": f"sha256:{picture.sha256}"}},
        {"type": "text", "text": "now"},
    ]


def test_a_continued_conversation_begins_with_the_recorded_ids_and_pictures(seeing: Any, eyes: Any) -> None:
    served = seeing()
    session, first, second = served.open(), draw(1), draw(2, 40, 24)
    begun = body(CHAT, [part(CHAT, first.data), "and?"])
    assert post(session, CHAT, begun).status_code == 200
    answer = {"role": "assistant", "content": "two"}
    for image in (second, first):
        turn = body(CHAT, [part(CHAT, image.data), "this?"], *begun["messages"], answer)
        assert post(session, CHAT, turn).status_code == 200
    other = body(CHAT, ["this?"], *body(CHAT, [part(CHAT, second.data), "and?"])["messages"], answer)
    assert post(session, CHAT, other).status_code == 200
    calls = session.close()
    before = [*calls[0].prompt_ids_P, *calls[0].sampled_ids_S]
    assert [call.parent for call in calls] == [None, 0, 0, None]  # another image is another history
    for call, image in zip(calls[1:3], (second, first), strict=True):
        assert call.prompt_ids_P[: len(before)].tolist() == before
        assert [span.picture for span in call.pictures] == [first, image]
        assert call.pictures[0] == calls[0].pictures[0]
        inside = np.concatenate([np.arange(span.start, span.stop) for span in call.pictures])
        assert inside.tolist() == np.flatnonzero(call.prompt_ids_P == eyes.image_token_id).tolist()
    assert calls[2].pictures[0].picture is calls[2].pictures[1].picture  # one object for one content


def test_a_stored_response_is_continued_with_its_picture(seeing: Any) -> None:
    session, picture = seeing().open(), draw(3)
    first = post(session, RESPONSES, body(RESPONSES, ["look", part(RESPONSES, picture.data)])).json()
    more = {"model": "toy", "input": "and now?", "previous_response_id": first["id"]}
    assert post(session, RESPONSES, more).status_code == 200
    one, two = session.close()
    assert (two.parent, two.pictures) == (0, one.pictures)


def test_stored_responses_keep_references_and_give_their_input_back_with_its_images(seeing: Any) -> None:
    """Red when the input is stored as it came: each of many turns would hold the images of all before."""
    session, picture = seeing().open(), draw(3, 64, 64)
    call = {"type": "function_call", "call_id": "call_1", "name": "shoot", "arguments": "{}"}
    shot = {"type": "function_call_output", "call_id": "call_1", "output": [part(RESPONSES, picture.data)]}
    asked = body(RESPONSES, ["look", part(RESPONSES, picture.data)])
    asked["input"] += [call, shot]
    stored = post(session, RESPONSES, asked).json()
    (kept,) = session.memory.responses.values()
    assert len(json.dumps(kept.input_items)) < 1000 < len(data_url(picture.data))
    headers = {"authorization": f"Bearer {session.model.api_key}"}
    url = f"{session.model.base_url}{RESPONSES}/{stored['id']}/input_items?order=asc"
    message, _, output = httpx.get(url, headers=headers, timeout=600).json()["data"]
    assert message["content"] == asked["input"][0]["content"]
    assert output["output"] == shot["output"]
    assert len(session.close()) == 1


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_tool_s_result_may_hold_an_image(seeing: Any, path: str) -> None:
    session, picture = seeing().open(), draw(4)
    image = part(path, picture.data)
    if path == MESSAGES:
        used = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}]}
        content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, image]
        result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": content}
        asked = body(path, [result], {"role": "user", "content": "look"}, used)
    else:
        call = {"type": "function_call", "call_id": "t", "name": "see", "arguments": "{}"}
        output = [{"type": "input_text", "text": "a\nb"}, image]
        said = {"role": "user", "content": "look"}
        items = [said, call, {"type": "function_call_output", "call_id": "t", "output": output}]
        asked = {"model": "toy", "input": items}
    reply = post(session, path, asked)
    assert reply.status_code == 200, reply.text
    (call,) = session.close()
    assert [span.picture for span in call.pictures] == [picture]
    content = call.messages[-1]["content"]
    assert (call.messages[-1]["role"], content[-1]["type"]) == ("tool", "image_url")
    assert "".join(one.get("text", "") for one in content) == ("Error: a\nb" if path == MESSAGES else "a\nb")


def saved(kind: str, size: tuple[int, int] = (8, 8)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


UNREADABLE: dict[str, bytes] = {
    "empty": b"",
    "no image": b"hello" * 20,
    "cut off": draw(1, 64, 64).data[:300],
    "a bomb": bomb(50_000, 50_000),
    "a large one": bomb(9_000, 9_000),
    "a wrong head": bomb(0, 5),
    "another format": saved("BMP"),
    "a drawing": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "entities": ENTITIES,
    "a thread": saved("PNG", (4000, 1)),
    "many scans": with_scans(500),
    "a cut film": moving(30)[:40],
}


@pytest.mark.parametrize("path", PROTOCOLS)
def test_what_is_no_image_is_the_vendor_s_400(seeing: Any, path: str) -> None:
    served = seeing()
    session = served.open()
    for name, content in UNREADABLE.items():
        reply = post(session, path, body(path, [part(path, content)]))
        assert (name, reply.status_code) == (name, 400)
        error = reply.json()["error"]
        assert (name, error["type"]) == (name, "invalid_request_error")
        assert error["message"].startswith(("messages", "input"))  # where it is
    assert (session.failure, session.close()) == (None, ())


WRONG: list[tuple[str, Any, str]] = [
    (CHAT, {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "not fetched"),
    (CHAT, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "not fetched"),
    (CHAT, {"type": "image_url", "image_url": {"url": "sha256:" + "0" * 64}}, "not fetched"),
    (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "base64"),
    (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,&&"}}, "base64"),
    (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A " * (21 << 20)}}, "20 MiB at most"),
    (CHAT, {"type": "image_url", "image_url": {"url": None}}, "None"),
    (CHAT, {"type": "image_url"}, "image_url: Field required"),
    (RESPONSES, {"type": "input_image", "image_url": "http://example.com/a.png"}, "not fetched"),
    (RESPONSES, {"type": "input_image", "file_id": "file-1"}, "data URL"),
    (MESSAGES, {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}, "not fetched"),
    (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}, "file"),
    (MESSAGES, {"type": "image", "source": {"type": "base64", "data": 3}}, "source.data"),
    (MESSAGES, {"type": "image"}, "source"),
]


@pytest.mark.parametrize(("path", "image", "said"), WRONG)
def test_images_are_not_fetched_and_must_be_whole(seeing: Any, path: str, image: Any, said: str) -> None:
    session = seeing().open()
    reply = post(session, path, body(path, [image]))
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert said in reply.json()["error"]["message"]
    assert session.close() == ()


@pytest.mark.parametrize("role", ["system", "assistant", {}, None])
def test_images_belong_to_users_and_tools(seeing: Any, role: Any) -> None:
    session = seeing().open()
    asked = body(CHAT, [part(CHAT, draw(1).data)])
    asked["messages"][0]["role"] = role
    assert post(session, CHAT, asked).status_code == 400
    items = body(RESPONSES, [part(RESPONSES, draw(1).data)])
    items["input"][0]["role"] = role
    assert post(session, RESPONSES, items).status_code == 400
    blocks = body(MESSAGES, [part(MESSAGES, draw(1).data)])
    blocks["messages"][0]["role"] = role
    assert post(session, MESSAGES, blocks).status_code == 400
    assert session.close() == ()


def test_more_images_than_are_taken(seeing: Any) -> None:
    session = seeing(max_model_len=100_000).open()
    image = part(CHAT, draw(1).data)
    assert post(session, CHAT, body(CHAT, [image] * MAX_IMAGES)).status_code == 200
    refused = post(session, CHAT, body(CHAT, [image] * (MAX_IMAGES + 1)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_images")
    large = post(session, CHAT, body(CHAT, [part(CHAT, b"x" * (MAX_IMAGE_BYTES + 1))]))
    assert (large.status_code, "20 MiB" in large.text) == (400, True)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_more_images_than_the_context_holds(seeing: Any, path: str) -> None:
    session = seeing(max_model_len=60).open()
    reply = post(session, path, body(path, [part(path, draw(1, 64, 64).data)]))
    assert (reply.status_code, session.failure) == (400, Outcome.CONTEXT_OVERFLOW)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_model_without_eyes_is_named(serve: Any, path: str) -> None:
    session = serve("hi").open()
    reply = post(session, path, body(path, [part(path, draw(1).data)]))
    assert reply.status_code == 400
    assert "toy reads only text" in reply.json()["error"]["message"]


def test_why_a_model_looks_at_no_images_is_said(serve: Any) -> None:
    session = serve("hi", album=Album(lack="its processor is missing")).open()
    assert "its processor is missing" in post(session, CHAT, body(CHAT, [part(CHAT, draw(1).data)])).text


def test_a_text_that_stands_for_an_image_is_refused_beside_one(seeing: Any) -> None:
    served = seeing()
    session = served.open()
    reply = post(session, CHAT, body(CHAT, ["<|image_pad|>", part(CHAT, draw(1).data)]))
    assert (reply.status_code, "2 times" in reply.json()["error"]["message"]) == (400, True)
    assert post(session, CHAT, body(CHAT, ["<|image_pad|>"])).status_code == 200  # as any text


def test_a_template_that_writes_no_images_is_refused(serve: Any, eyes: Any) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content[0].type }}{% endfor %}"
    session = serve("hi", tokenizer=tokenizer, album=Album(eyes)).open()
    reply = post(session, CHAT, body(CHAT, [part(CHAT, draw(1).data)]))
    assert (reply.status_code, "no place" in reply.json()["error"]["message"]) == (400, True)


def test_tokens_of_images_are_counted(seeing: Any, eyes: Any) -> None:
    session, picture = seeing().open(), draw(1, 40, 24)
    counted = post(session, f"{MESSAGES}/count_tokens", body(MESSAGES, [part(MESSAGES, picture.data)])).json()
    message = body(CHAT, [part(CHAT, picture.data)])["messages"][0]
    assert asyncio.run(session.model.count_tokens([message])) == counted["input_tokens"]
    assert post(session, CHAT, {"model": "toy", "messages": [message]}).status_code == 200
    (call,) = session.close()
    assert counted["input_tokens"] == len(call.prompt_ids_P)
    with pytest.raises(ConfigError, match="not fetched"):
        asyncio.run(
            session.model.count_tokens([{"role": "user", "content": [{"type": "image_url", "image_url": "http://a"}]}])
        )


async def current_thread() -> threading.Thread:
    return threading.current_thread()


class SlowEyes:
    """Looks at nothing until it may."""

    def __init__(self, eyes: Any) -> None:
        self.eyes, self.may, self.threads = eyes, threading.Event(), set[threading.Thread]()

    def features(self, picture: Picture) -> Any:
        self.threads.add(threading.current_thread())
        assert self.may.wait(600)
        return self.eyes.features(picture)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.eyes, name)


def test_images_are_decoded_beside_the_serving_loop_and_calls_keep_their_order(
    serve: Any, folder: Any, eyes: Any
) -> None:
    slow = SlowEyes(eyes)
    served = serve("hi", tokenizer=AutoTokenizer.from_pretrained(folder), album=Album(slow))
    session, other = served.open(), served.open("g/1")

    async def ask() -> None:
        first = session.model.client.chat.completions.create(**body(CHAT, [part(CHAT, draw(1).data)]))
        begun = asyncio.create_task(first)
        while not slow.threads:
            await asyncio.sleep(0)
        second = asyncio.create_task(session.model.client.chat.completions.create(**body(CHAT, ["text"])))
        await other.model.client.chat.completions.create(**body(CHAT, ["text"]))  # others are not held up
        assert not second.done()
        slow.may.set()
        await asyncio.gather(begun, second)

    asyncio.run(ask())
    assert [len(call.pictures) for call in session.close()] == [1, 0]
    assert served.serving.run(current_thread()) not in slow.threads


def test_one_content_is_decoded_once_while_it_is_held(seeing: Any) -> None:
    served, picture = seeing(), draw(9)
    sessions = [served.open(f"g/{number}") for number in range(3)]
    for session in sessions:
        assert post(session, CHAT, body(CHAT, [part(CHAT, picture.data)])).status_code == 200
    shown = [session.close()[0].pictures[0].picture for session in sessions]
    assert shown[0] is shown[1] is shown[2]


def test_the_record_of_a_call_has_no_image_in_its_messages(seeing: Any) -> None:
    session, picture = seeing().open(), draw(5, 64, 64)
    for path in PROTOCOLS:
        assert post(session, path, body(path, [part(path, picture.data), "?"])).status_code == 200
    for call in session.close():
        assert len(json.dumps(call.messages)) < 400


class WatchingEyes(SlowEyes):
    """Knows on which threads prompts are made."""

    def expand_text(self, *given: Any) -> str:
        self.threads.add(threading.current_thread())
        return str(self.eyes.expand_text(*given))


def test_prompts_with_images_are_made_beside_the_serving_loop(serve: Any, folder: Any, eyes: Any) -> None:
    """Their bodies are short. Red when `Gateway._beside` goes by the length of the body alone."""
    watching = WatchingEyes(eyes)
    watching.may.set()
    served = serve("hi", tokenizer=AutoTokenizer.from_pretrained(folder), album=Album(watching))
    session = served.open()
    assert post(session, CHAT, body(CHAT, [part(CHAT, draw(1).data)])).status_code == 200
    watching.threads.clear()
    assert post(session, CHAT, body(CHAT, [part(CHAT, draw(1).data), "and?"])).status_code == 200  # decoded before
    assert watching.threads
    assert served.serving.run(current_thread()) not in watching.threads
