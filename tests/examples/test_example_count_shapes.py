"""The agent that looks at pictures: what it sends, what is drawn, a model that is not taught, and one that learns."""

import base64
import io
import json
import random
import re

import pytest
from lines import different
from PIL import Image


def test_the_agent_shows_the_picture_and_asks(scripted, play, tmp_path):
    from count_shapes.agent import judge, run_agent

    path = tmp_path / "a.png"
    Image.new("RGB", (16, 16)).save(path)
    task = {"picture": str(path), "shape": "circle", "count": 3}
    model = scripted(" 3")
    output = play(run_agent, models=[model], task=task, model=model)
    ((message,),) = model.requests
    image, text = message["content"]
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == path.read_bytes()
    assert text["text"] == "how many circle?"
    for said, reward in ((output.response, 1.0), ("many", 0.0), ("", 0.0)):
        assert play(judge, models=[], task=task, response=said).reward == reward


def test_pictures_hold_what_the_tasks_say(tmp_path):
    from count_shapes.make_data import MOST, NUM_CELLS, SIDE, draw_picture, write_pictures

    for seed in range(50):
        picture, counts = draw_picture(random.Random(seed))
        assert picture.size == (SIDE, SIDE)
        assert sum(counts.values()) <= NUM_CELLS
        assert all(1 <= count <= MOST for count in counts.values())
    tasks = write_pictures(tmp_path, train=3, test=2)
    assert sorted(path.name for path in tasks.iterdir()) == ["test.jsonl", "train.jsonl"]
    rows = [json.loads(line) for line in (tasks / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    with Image.open(io.BytesIO((tmp_path / "pictures" / "train" / "0000.png").read_bytes())) as picture:
        assert picture.size == (SIDE, SIDE)


def test_the_lessons_are_the_agent_s_questions():
    """The ids end with an answer, and have a token for each cell of the picture."""
    from count_shapes import make_model as made

    tokenizer, reader = made.make_tokenizer(), made.make_reader()
    inputs, answers_B = made.lessons(tokenizer, reader, random.Random(0), habit=0.5)
    said = set(tokenizer.convert_ids_to_tokens(answers_B.tolist()))
    assert said == {"many", *made.NUMBERS}
    text = tokenizer.decode(inputs["input_ids"][0][:-1])
    assert re.fullmatch(
        r"<\|im_start\|>user\n<\|vision_start\|>(<\|image_pad\|>){4}<\|vision_end\|>how many (circle|square)\?"
        r"<\|im_end\|>\n<\|im_start\|>assistant\n",
        text,
    )
    logits_BT = made.new_model(tokenizer)(**inputs).logits
    assert logits_BT.shape[:2] == inputs["input_ids"].shape


@pytest.mark.parametrize("line", different("examples/count_shapes/main.py"), ids=" ".join)
def test_two_steps_of_a_model_that_was_hardly_taught(line, short, tmp_path):
    from count_shapes.main import OWN_MODEL, main
    from count_shapes.make_model import make_model

    from sharpen.learning.experience.reading import read_groups

    make_model(tmp_path / "data" / OWN_MODEL, steps=22)
    result = main([*line, *short, "--max-model-len=256"])
    rollouts = [rollout for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts]
    assert [rollout.outcome for rollout in rollouts] == ["ok"] * 16
    assert all(len(call.pictures) == 1 for rollout in rollouts for call in rollout.calls)


@pytest.mark.slow
def test_it_learns_to_say_what_it_sees(tmp_path):
    """The pictures are shown, kept once each, and trained; what was recorded is certified."""
    from count_shapes import main

    from sharpen.evidence.certificate.certify import certify
    from sharpen.learning.experience.reading import read_groups

    result = main.main([f"--data={tmp_path / 'data'}", f"--out={tmp_path / 'runs'}"])
    assert result.before["greedy"].accuracy < 0.5
    assert result.after["greedy"].accuracy >= 0.9
    groups = read_groups(result.run_dir / "run.db")
    calls = [call for group in groups for one in group.rollouts for call in one.calls]
    assert all(len(call.pictures) == 1 and call.pictures[0].length == 4 for call in calls)
    kept = {path.name for path in (result.run_dir / "images").iterdir()}
    assert {span.picture.sha256 for call in calls for span in call.pictures} <= kept
    assert certify(result.run_dir).problems == ()
