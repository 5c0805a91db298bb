"""Trinity's workflow with images: the row's images reach the model in the question's places."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from picture_toys import draw, make_seeing_checkpoint
from PIL import Image
from transformers import AutoConfig
from trinity_serving import MakePlace, Place

from sharpen.compat.trinity import MultiTurnWorkflow
from sharpen.compat.trinity.imports.stand_in import MODULES
from sharpen.compat.trinity.workflows.pictures import build_mm_message
from sharpen.errors import DatasetError
from sharpen.gateway.images import Album, decoded
from sharpen.models.images import eyes_of
from sharpen.types import Outcome, Picture

ONE, TWO = (Image.open(io.BytesIO(draw(seed, 40, 24).data)) for seed in (1, 2))
KEYS = {"prompt_key": "problem", "response_key": "answer", "image_key": "images", "reward_fn": "math_boxed_reward"}
ROW = {"problem": "<image>Find x in <image>.", "answer": "7", "images": [ONE, TWO]}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path) -> Path:
    return make_seeing_checkpoint("qwen3_vl", tmp_path_factory.mktemp("seeing"), toy_model_dir)


@pytest.fixture
def place(seeing: Path) -> Iterator[Place]:
    eyes = eyes_of(seeing, AutoConfig.from_pretrained(seeing))
    made = Place(seeing, lambda prompt: r"so \boxed{7}", album=Album(eyes))
    yield made
    made.close()


@pytest.mark.parametrize("name", ["simple_mm_workflow", "async_simple_mm_workflow"])
def test_the_images_of_a_row_are_shown_in_their_places_and_the_answer_scored(place: Place, name: str) -> None:
    rollout = place.one(name, copy.deepcopy(ROW), taskset=KEYS)
    assert (rollout.outcome, rollout.reward, rollout.error) == (Outcome.OK, pytest.approx(1.0, abs=0.2), None)
    (call,) = rollout.calls
    assert [part["type"] for part in call.messages[1]["content"]] == ["image_url", "text", "image_url", "text"]
    shown = [Image.open(io.BytesIO(span.picture.data)) for span in call.pictures]
    assert [image.tobytes() for image in shown] == [ONE.tobytes(), TWO.tobytes()]
    assert call.messages[0]["role"] == "system"
    assert "boxed" in call.messages[0]["content"]
    own = place.one(name, copy.deepcopy(ROW), taskset={**KEYS, "system_prompt": "Be brief."})
    assert own.calls[0].messages[0]["content"] == "Be brief."


def test_a_row_without_images_is_asked_as_text(place: Place) -> None:
    rollout = place.one("simple_mm_workflow", {**ROW, "problem": "Find x.", "images": []}, taskset=KEYS)
    assert rollout.calls[0].pictures == ()
    assert rollout.calls[0].messages[1]["content"] == "Find x."


class Looks(MultiTurnWorkflow):
    """A workflow of one's own, with images as transformers writes them."""

    def run(self) -> list[Any]:
        """Ask twice, and make one experience of the conversation."""
        part = {"type": "image", "image": self.task.raw_task["images"][0]}
        messages: list[Any] = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        (first,) = self.model.chat(messages)
        messages += [{"role": "assistant", "content": first.response_text}, {"role": "user", "content": "sure?"}]
        (second,) = self.model.chat(messages)
        messages.append({"role": "assistant", "content": second.response_text})
        experience = self.model.convert_messages_to_experience(messages)
        experience.reward = 1.0
        return [experience]


def test_a_workflow_of_one_s_own_may_send_images_of_pillow_and_make_an_experience_of_them(place: Place) -> None:
    rollout = place.one(Looks, copy.deepcopy(ROW), taskset=KEYS)
    assert rollout.error is None
    assert [[span.picture for span in call.pictures] for call in rollout.calls] == [[_png(ONE)]] * 2
    assert rollout.calls[1].parent == 0


def _png(image: Any) -> Picture:
    (part,) = build_mm_message("", [image])["content"]
    return Picture.of(decoded(part["image_url"]["url"].partition(",")[2]))


def test_what_a_row_lacks_or_no_model_reads_is_named(place: Place, make_place: MakePlace) -> None:
    with pytest.raises(DatasetError, match="says <image> 2 times, but its row has 1 images"):
        build_mm_message("<image><image>", [ONE])
    with pytest.raises(DatasetError, match="1 videos, which no model reads here"):
        place.one("simple_mm_workflow", {**ROW, "film": ["a.mp4"]}, taskset={**KEYS, "video_key": "film"})
    blind = make_place("7").one("simple_mm_workflow", copy.deepcopy(ROW), taskset=KEYS)
    assert blind.outcome == Outcome.WORKFLOW_ERROR
    assert "is an image, but the model toy reads only text" in str(blind.error)


def test_the_names_are_where_trinity_has_them() -> None:
    assert "build_mm_message" in MODULES["trinity.common.models.mm_utils"]
    assert "SimpleMMWorkflow" in MODULES["trinity.common.workflows.simple_mm_workflow"]
