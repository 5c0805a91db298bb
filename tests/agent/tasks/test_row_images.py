"""The images of a dataset's rows: whatever holds them becomes a data URL, in the place that the messages name."""

import base64
import io

import datasets
import pytest
from picture_toys import ENTITIES, bomb, draw
from PIL import Image

from sharpen.agent.tasks.images import data_url, with_images
from sharpen.config.rows import load_tasks
from sharpen.config.run import DatasetConfig
from sharpen.errors import DatasetError
from sharpen.learning.experience.images import stand_in

PNG = draw(1).data
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
SHOWN = {"type": "image_url", "image_url": {"url": URL}}


def text(words):
    return {"type": "text", "text": words}


def test_a_file_s_bytes_are_kept_as_they_are_in_every_form_that_holds_them(tmp_path):
    path = tmp_path / "one.png"
    path.write_bytes(PNG)
    for value in (PNG, {"bytes": PNG, "path": None}, {"bytes": None, "path": str(path)}, str(path), path, URL):
        assert data_url(value) == URL


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1", "CMYK", "I;16", "F"])
def test_an_image_of_pillow_becomes_a_file(mode):
    image = Image.open(io.BytesIO(PNG)).convert("L").convert(mode)
    content = base64.b64decode(data_url(image).partition(",")[2])
    again = Image.open(io.BytesIO(content))
    assert (again.format, again.size) == ("PNG", image.size)
    assert data_url(image.copy()) == data_url(image)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "of the type int"),
        ("https://x.com/a.png", "'https://x.com/a.png': images are not fetched"),
        ("no-such-file.png", "'no-such-file.png' cannot be read: No such file"),
        ("a\0b", "cannot be read"),
        ({"bytes": None, "path": None}, "of the type NoneType"),
    ],
)
def test_what_holds_no_image_is_named(value, words):
    with pytest.raises(DatasetError, match=words):
        data_url(value)


@pytest.mark.parametrize(
    ("content", "number", "expected"),
    [
        ("<image>what?", 1, [SHOWN, text("what?")]),
        ("a<image>b<image>", 2, [text("a"), SHOWN, text("b"), SHOWN]),
        ("what?", 2, [SHOWN, SHOWN, text("what?")]),
        ("a<image>", 2, [SHOWN, text("a"), SHOWN]),
        ([{"type": "image"}, text("what?")], 1, [SHOWN, text("what?")]),
        ([{"type": "image", "text": None}, text("and <image>?")], 2, [SHOWN, text("and "), SHOWN, text("?")]),
        ([{"type": "image", "image": PNG}, text("what?")], 0, [SHOWN, text("what?")]),
        ([{"type": "image", "base64": URL.partition(",")[2]}], 0, None),
        ([SHOWN, text("<image>")], 0, [SHOWN, text("<image>")]),
        ("<image> as text", 0, "<image> as text"),
    ],
)
def test_images_go_where_the_messages_name_them_and_what_is_left_goes_first(content, number, expected):
    (message,) = with_images([{"role": "user", "content": content}], [PNG] * number)
    if expected is None:
        assert message["content"][0]["image_url"]["url"].endswith(URL.partition(",")[2])
    else:
        assert message == {"role": "user", "content": expected}


def test_an_answer_s_text_takes_no_image():
    asked, answered = {"role": "user", "content": "?"}, {"role": "assistant", "content": "write <image>"}
    assert with_images([asked, answered], [PNG]) == [{"role": "user", "content": [SHOWN, text("?")]}, answered]


@pytest.mark.parametrize("content", ["<image><image>", [{"type": "image"}, {"type": "image"}]])
def test_too_few_images_are_named(content):
    with pytest.raises(DatasetError, match="fewer images than its messages name"):
        with_images([{"role": "user", "content": content}], [PNG])
    with pytest.raises(DatasetError, match="1 images, but no message of a user"):
        with_images([{"role": "system", "content": "a"}], [PNG])


def test_an_image_in_a_row_stands_for_the_same_text_whenever_it_is_read():
    """Red with `repr`, which has the address of the object."""
    images = [Image.open(io.BytesIO(PNG)) for _ in range(2)]
    assert stand_in(images[0]) == stand_in(images[1]) != stand_in(Image.open(io.BytesIO(draw(2).data)))
    assert stand_in({1}) == "{1}"


@pytest.mark.parametrize("content", [bomb(50_000, 50_000), bomb(20, 20), ENTITIES], ids=["bomb", "torn", "drawing"])
def test_a_row_whose_image_cannot_be_decoded_is_named(content, tmp_path):
    """Red with Pillow's own error, which names no row: the library decodes an image when its row is read."""
    features = datasets.Features({"image": datasets.Image()})
    rows = datasets.Dataset.from_dict({"image": [{"bytes": PNG}, {"bytes": content}]}, features=features)
    rows.to_parquet(str(tmp_path / "train.parquet"))
    tasks = load_tasks(DatasetConfig(path=str(tmp_path / "train.parquet"), split="train"))
    assert tasks[0].row["image"].size == (16, 16)
    with pytest.raises(DatasetError, match=r"the row train/1 cannot be read: \w+Error"):
        tasks[1]
