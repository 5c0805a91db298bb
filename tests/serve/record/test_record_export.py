"""`sharpen export`: rollouts for `datasets`, with thumbs; the model as GGUF; what cannot be handed on."""

import json
import os
import stat

import datasets
import pytest
from reported_runs import answered, make_run

from sharpen.cli.main import main
from sharpen.learning.experience.journal import Journal
from sharpen.show.view.notes import new_note, write_note
from sharpen.types import Task

PARTS = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "data:,"}}]


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path, {"test/0": (("a", 0.0), ("b", 1.0))})
    journal = Journal(run / "run.db")
    for number, (question, reward) in enumerate((("q", 1.0), (PARTS, None))):
        task = Task(id=f"train/{number}", index=number, row={"question": question})
        journal.add(answered(f"step-0/train/{number}", task, f"said {number}", reward))
    journal.close()
    write_note(run, new_note("step-0/train/0/0", "run.db", 1, "up", "like this"))
    write_note(run, new_note("step-0/train/1/0", "evaluations.db", 1, "down", "of another journal"))
    return run


@pytest.mark.parametrize("name", ["all.jsonl", "all.parquet"])
def test_rollouts_are_read_by_datasets(run, tmp_path, name, capsys):
    """One table, though a content is text here and parts there."""
    path = tmp_path / name
    assert main(["export", str(run), "--for", "datasets", "--to", str(path)]) == 0
    assert "rows by reward: 1 of 1, 1 without one" in capsys.readouterr().out
    kind = "parquet" if name.endswith("parquet") else "json"
    rows = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    first, second = rows.to_list()
    assert [message["content"] for message in first["messages"]] == ["be brief", "q", "said 0"]
    assert (first["reward"], first["outcome"], first["thumb"], first["note"]) == (1.0, "ok", "up", "like this")
    assert (second["reward"], second["outcome"], second["thumb"]) == (None, "judge_error", "")
    assert second["messages"][1]["content"] == "what is\n[image_url]"
    assert json.loads(first["task"]) == {"question": "q"}
    assert main(["export", str(run), "--for", "datasets", "--to", str(path)]) == 2, "nothing is overwritten"


def test_the_model_as_gguf(run, tmp_path, toy_model_dir, monkeypatch, capsys):
    """With a converter that says what it was given."""
    words = ["export", str(run), "--for", "gguf", "--to", str(tmp_path / "model.gguf")]
    assert main(words) == 2
    assert "is not there any more" in capsys.readouterr().err
    (run / "global_step_3").symlink_to(toy_model_dir)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 2
    assert "convert_hf_to_gguf.py" in capsys.readouterr().err
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("import sys\nopen(sys.argv[3], 'w').write(sys.argv[1])\n")
    converter.chmod(converter.stat().st_mode | stat.S_IXUSR)
    assert main(words) == 0
    assert (tmp_path / "model.gguf").read_text() == str(run / "global_step_3")
    assert main(words) == 2
    os.remove(tmp_path / "model.gguf")
    converter.write_text("raise SystemExit('unknown architecture')\n")
    assert main(words) == 2
    assert "unknown architecture" in capsys.readouterr().err


@pytest.mark.parametrize("towers", [(), ("vision_config",), ("vision_config", "audio_config")])
def test_a_gguf_says_which_towers_it_has_not(run, tmp_path, monkeypatch, capsys, towers):
    """llama.cpp's converter leaves them out in silence. Red when `_not_in_gguf` returns nothing."""
    (run / "global_step_3").mkdir()
    (run / "global_step_3" / "config.json").write_text(json.dumps({tower: {"depth": 1} for tower in towers}))
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("import sys\nopen(sys.argv[3], 'w').write(sys.argv[1])\n")
    converter.chmod(converter.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["export", str(run), "--for", "gguf", "--to", str(tmp_path / "model.gguf"), "--json"]
    assert main(words) == 0
    left_out = json.loads(capsys.readouterr().out)["left_out"]
    assert len(left_out) == bool(towers)
    for tower, name in zip(towers, ("a vision tower", "an audio tower"), strict=False):
        assert name in left_out[0], tower
    assert all("--mmproj" in line for line in left_out)


def test_the_original_is_not_handed_on(tmp_path, capsys):
    verdict = {"kind": "worse", "original": True, "model": "org/base", "text": "worse by 0.1"}
    run = make_run(tmp_path, {"test/0": (("a", 1.0), ("b", 0.0))}, summary={"verdict": verdict})
    assert main(["export", str(run), "--for", "hub", "--to", "me/model"]) == 2
    assert "org/base" in capsys.readouterr().err


def test_an_option_of_another_purpose(run, tmp_path, capsys):
    assert main(["export", str(run), "--for", "datasets", "--to", str(tmp_path / "x"), "--min-reward", "1"]) == 2
    assert "--min-reward is for sft" in capsys.readouterr().err
