"""Images in recorded requests: kept once as files, named in messages by their hash, put back by an export."""

import base64
import json
from dataclasses import replace

from experience_builders import make_call

from sharpen.learning.experience.reading import read_groups
from sharpen.serve.record.rows import LeftOut, sft_rows
from sharpen.serve.record.sessions import RecordedSession
from sharpen.types import Picture, PictureSpan, Task

PNG = Picture.of(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40)
OTHERS = ("https://example.com/a.png", "data:image/png;base64,?", "data:text/plain;base64,aGk=")


def image(url: str, **about: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **about}}


ASK = {
    "role": "user",
    "content": [{"type": "text", "text": "this?"}, image(PNG.data_url, detail="low"), *map(image, OTHERS)],
}


def ask(recorder, *messages: dict) -> dict:
    reply = recorder.post("/v1/chat/completions", key="mine", messages=list(messages))
    return reply.json()["choices"][0]["message"]


def test_an_image_is_kept_once_as_a_file_and_is_whole_again_in_an_export(start, tmp_path):
    """Red when messages are written as they came: with each turn all images of the turns before once more."""
    recorder = start()
    answer = ask(recorder, ASK)
    assert recorder.fake.received[0]["messages"] == [ASK]
    (session,) = recorder.sessions._by_id.values()
    assert [span.picture.content for call in session.calls for span in call.pictures] == [None]
    recorder.journal.flush()
    recorder = start()  # what an earlier recorder wrote goes on
    ask(recorder, ASK, answer, {"role": "user", "content": [image(PNG.data_url)]})
    (rollout,) = recorder.rollouts()
    one, two = rollout.calls
    assert (two.parent, one.pictures, two.pictures) == (0, two.pictures[:1], (two.pictures[0],) * 2)
    assert one.messages[0]["content"][1:] == [image(f"sha256:{PNG.sha256}", detail="low"), *map(image, OTHERS)]
    assert len(json.dumps(two.messages)) < 1500 < len(PNG.data_url)
    (file,) = (tmp_path / "images").iterdir()
    assert file.read_bytes() == PNG.data
    (row,) = sft_rows(read_groups(recorder.journal.path), None, LeftOut())
    assert [message["content"] for message in row["messages"][::2]] == [ASK["content"], [image(PNG.data_url)]]
    assert base64.b64encode(PNG.data).decode() in json.dumps(row)


def test_a_call_that_begins_with_other_images_continues_no_call():
    """All images of one size have the same ids. Red when only ids are compared."""

    def shown(content: bytes) -> tuple[PictureSpan, ...]:
        return (PictureSpan(picture=Picture.of(content), start=0, length=0),)

    session = RecordedSession(id="s", key=b"", task=Task(id="", index=0, row={}), opened=0, used=0, own=False)
    session.take([make_call(0, [1, 7], [2], pictures=shown(b"red"))])
    later = make_call(1, [1, 7, 2, 4], [5])
    (other,) = session.take([replace(later, pictures=shown(b"blue"))])
    (same,) = session.take([replace(later, index=2, pictures=(*shown(b"red"), *shown(b"blue")))])
    assert (other.parent, same.parent) == (None, 0)
