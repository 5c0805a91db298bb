"""The model card in a checkpoint."""

import pytest
from reported_runs import make_run

from sharpen.models.identity import model_identity
from sharpen.show.report.card import MARK, front_matter, write_cards

ANSWERS = {f"test/{n}": (("wrong", 0.0), ("right", 1.0)) for n in range(4)}


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path, ANSWERS)
    for step in (1, 3):
        (run / f"global_step_{step}").mkdir()
    return run


def test_every_kept_checkpoint_has_one(run):
    (run / "global_step_3" / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\ntags: [base]\n---\nThe base.")
    assert [path.parent.name for path in write_cards(run)] == ["global_step_1", "global_step_3"]
    text = (run / "global_step_3" / "README.md").read_text()
    head = front_matter(text)
    assert (head["license"], head["language"], head["base_model"]) == ("mit", ["en"], "org/base")
    assert head["tags"] == ["sharpen", "reinforcement-learning", "grpo"]
    assert MARK in text
    assert "The base." not in text
    assert "This is the checkpoint to use" in text
    assert "ran out of time" in text, "a remark below the verdict"
    assert "| held-out, sampled | 4 |" in text
    earlier = (run / "global_step_1" / "README.md").read_text()
    assert "This is the checkpoint to use" not in earlier
    assert "| held-out, sampled |" not in earlier, "it was not this one that was evaluated"
    assert front_matter((run / "global_step_3" / "README.md").read_text())["license"] == "mit"


def test_a_card_that_somebody_wrote_stays(run):
    (run / "global_step_1" / "README.md").write_text("my own words")
    assert [path.parent.name for path in write_cards(run, replace=False)] == ["global_step_3"]
    assert (run / "global_step_1" / "README.md").read_text() == "my own words"
    assert [path.parent.name for path in write_cards(run, replace=False)] == ["global_step_3"]


def test_paths_of_this_machine_are_not_in_it(tmp_path):
    settings = {
        "model.model_path": {"value": str(tmp_path / "secret" / "base"), "origin": "file"},
        "train_dataset.path": {"value": "/home/somebody/data", "origin": "file"},
        "algorithm.learning_rate": {"value": 1e-6, "origin": "file"},
    }
    run = make_run(tmp_path, ANSWERS, resolved=settings)
    (run / "global_step_3").mkdir()
    (path,) = write_cards(run)
    text = path.read_text()
    assert "secret" not in text
    assert "somebody" not in text
    assert "learning" in text
    assert "base_model" not in front_matter(text)


def test_a_checkpoint_is_the_same_model_with_it(run, toy_model_dir):
    import shutil

    shutil.copytree(toy_model_dir, run / "global_step_3", dirs_exist_ok=True)
    before = model_identity(run / "global_step_3")
    write_cards(run)
    assert model_identity(run / "global_step_3") == before


@pytest.mark.parametrize("text", ["", "no head", "---\n: [\n---\n", "---\n- a list\n---\n"])
def test_a_head_that_cannot_be_read_is_empty(text):
    assert front_matter(text) == {}
