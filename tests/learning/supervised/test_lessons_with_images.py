"""Rows with images: read as the gateway reads those of requests, never trained on their tokens, and checked."""

from dataclasses import replace

import numpy as np
import pytest
from picture_toys import IMAGES, draw, make_seeing_checkpoint
from supervised_toys import task, taught, tutor
from transformers import AutoConfig

from sharpen.errors import DatasetError
from sharpen.gateway.images import Album
from sharpen.learning.algorithm.supervised import SUPERVISED
from sharpen.learning.supervised.batches import taught_row, weighted
from sharpen.learning.supervised.checks import check_step
from sharpen.models.images import eyes_of

ONE, TWO = draw(1, 40, 24), draw(2, 40, 24)


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def seeing(request, tmp_path_factory, toy_model_dir):
    folder = make_seeing_checkpoint(request.param, tmp_path_factory.mktemp("seeing"), toy_model_dir)
    eyes = eyes_of(folder, AutoConfig.from_pretrained(folder))
    return request.param, eyes, replace(tutor(folder), album=Album(eyes))


TURNS = [
    {"role": "user", "content": "what is <image>?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and this?"}]},
    {"role": "assistant", "content": "no"},
]
ROW = {"messages": TURNS, "images": [ONE.data, TWO.data]}


def test_a_row_has_the_ids_of_the_model_s_own_processor_and_its_answers_alone_are_taught(seeing):
    kind, eyes, one = seeing
    (experience,) = (lesson := one.lesson(task(**ROW))).experiences
    shown = IMAGES[kind]
    text = (
        f"<|im_start|>user\nwhat is {shown}?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        f"<|im_start|>user\n{shown}and this?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
    )
    ids, spans = eyes.expand(text, [ONE, TWO])
    assert experience.ids_T.tolist() == ids.tolist()
    assert experience.pictures == spans
    assert taught(one, lesson) == ["yes<|im_end|>", "no<|im_end|>"]
    assert not experience.loss_mask_T[ids == eyes.image_token_id].any()
    recorded = lesson.sources[0][1].messages
    assert recorded[0]["content"][1] == {"type": "image_url", "image_url": {"url": f"sha256:{ONE.sha256}"}}


def test_a_prompt_and_a_pair_have_images_too(seeing):
    one = seeing[2]
    lesson = one.lesson(task(prompt="how many?", response="1", images=ONE.data))
    assert [span.picture for span in lesson.experiences[0].pictures] == [ONE]
    pairs = replace(one, data="pairs")
    lesson = pairs.lesson(task(prompt="<image>how many?", chosen="1", rejected="2", images=[ONE.data]))
    assert [[span.picture for span in side.pictures] for side in lesson.experiences] == [[ONE], [ONE]]
    own = replace(one, fields=one.fields.model_copy(update={"images_key": "other"}))
    assert own.lesson(task(prompt="?", response="1", images=[ONE.data])).experiences[0].pictures == ()


@pytest.mark.parametrize("images", [["a.png", "b.png"], "https://example.com/a.png", 3, [], None, [None]])
def test_a_column_that_nobody_named_may_be_about_something_else(seeing, images):
    """Red when the field `images` of every row is read: text that trained before images did was refused."""
    one = seeing[2]
    plain = {"prompt": "what?", "response": "yes"}
    lesson = one.lesson(task(**plain, images=images))
    assert lesson.experiences[0].ids_T.tolist() == one.lesson(task(**plain)).experiences[0].ids_T.tolist()
    pair = replace(one, data="pairs").lesson(task(prompt="what?", chosen="yes", rejected="no", images=images))
    assert pair.experiences[0].pictures == ()


def test_a_column_that_was_named_is_read_of_every_row(seeing, tmp_path):
    (tmp_path / "one.png").write_bytes(ONE.data)
    row = task(prompt="what?", response="yes", images=[str(tmp_path / "one.png")])
    named = replace(seeing[2], fields=seeing[2].fields.model_copy(update={"images_key": "images"}))
    assert [span.picture for span in named.lesson(row).experiences[0].pictures] == [ONE]


def verdict(one, lesson, *trained):
    checks = check_step([lesson], [trained], one)
    return {check.name: check.first for check in checks if check.broken}


def test_images_that_were_lost_or_swapped_or_lie_elsewhere_break_the_checks(seeing):
    """Two images of one size have the same ids."""
    _, _, one = seeing
    lesson = one.lesson(task(**ROW))
    (good,) = weighted([lesson], SUPERVISED["sft"])
    assert verdict(one, lesson, good) == {}
    first, second = good.pictures
    changes = (
        (),
        (first,),
        (replace(first, picture=TWO), replace(second, picture=ONE)),
        (first, replace(second, start=second.start + 1)),
    )
    for pictures in changes:
        assert verdict(one, lesson, replace(good, pictures=pictures)).keys() == {"mask", "rendered"}


def test_the_digest_of_a_row_has_its_images(seeing):
    _, _, one = seeing
    rows = [task(prompt="<image>?", response="yes", images=[picture.data]) for picture in (ONE, TWO)]
    lessons = [one.lesson(row) for row in rows]
    assert np.array_equal(lessons[0].experiences[0].ids_T, lessons[1].experiences[0].ids_T)
    assert taught_row(rows[0], lessons[0]).ids_digest != taught_row(rows[0], lessons[1]).ids_digest


SHOWN = {"type": "image", "image": ONE.data}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "<image><image>", "response": "a", "images": [ONE.data]}, "fewer images than its messages name"),
        ({"prompt": "?", "response": "a", "images": [b"no image"]}, "no image that is read here"),
        ({"prompt": "<image>?", "response": "a", "images": ["missing.png"]}, "'missing.png' cannot be read"),
        ({"prompt": "?", "response": [{"role": "assistant", "content": [SHOWN]}]}, "of the role 'assistant'"),
    ],
)
def test_a_row_whose_images_cannot_be_read_is_named(seeing, row, words):
    with pytest.raises(DatasetError, match=rf"row train/3: .*{words}"):
        seeing[2].lesson(task(3, **row))


def test_a_model_without_eyes_refuses_a_row_with_images_by_name(toy_model_dir):
    one = replace(tutor(toy_model_dir), album=Album(lack="the model toy reads only text: it has no vision tower"))
    with pytest.raises(DatasetError, match=r"row train/0: .*the model toy reads only text.*images out of the rows"):
        one.lesson(task(**ROW))
