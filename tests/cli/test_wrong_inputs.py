"""What a user may get wrong ends with exit code 2 and one message that names it, not in a traceback."""

import json
import shutil
import struct

import pytest
from shop_runs import Maker, RunSize, make_run

from sharpen.cli.main import main
from sharpen.config.functions import import_function
from sharpen.errors import ConfigError, ModelError
from sharpen.models.configuration import load_tokenizer
from sharpen.models.files import model_folder


@pytest.fixture
def model(toy_model_dir, tmp_path):
    """A copy of a model, to be damaged."""
    return shutil.copytree(toy_model_dir, tmp_path / "model")


def refused(capsys, *words):
    """The message with which a command refuses; it must be its only one, and the exit code 2."""
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("sharpen: ")
    return said


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def split(model, parts):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))


def test_a_whole_model_is_taken(model):
    """What is not loaded may be missing: an index beside the whole weights, that of other weights."""
    parts = json.dumps({"weight_map": {"a": "model-2-of-2.safetensors"}})
    for name in ("model.safetensors.index.json", "model.fp16.safetensors.index.json"):
        (model / name).write_text(parts)
    assert model_folder(str(model)) == model


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda model: (model / "config.json").write_text("{}"), ("config.json", "model_type")),
        (lambda model: (model / "config.json").write_text(""), ("config.json",)),
        (lambda model: (model / "config.json").write_text("[" * 100_000), ("config.json",)),
        (lambda model: cut(model / "tokenizer.json", 100), ("tokenizer.json",)),
        (lambda model: cut(model / "model.safetensors", 4), ("model.safetensors", "4 bytes")),
        (lambda model: cut(model / "model.safetensors", 60), ("model.safetensors", "60 bytes")),
        (lambda model: cut(model / "model.safetensors", 20_000), ("model.safetensors", "20000 of")),
        (
            lambda model: (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"),
            ("model.safetensors", "header"),
        ),
        (lambda model: split(model, {"a": "model-2-of-2.safetensors"}), ("model-2-of-2.safetensors", "missing")),
        (lambda model: split(model, None), ("model.safetensors.index.json", "weight_map")),
    ],
    ids=["no type", "empty", "deep", "tokenizer", "4", "header", "tensors", "no header", "shard", "no map"],
)
def test_torn_files_of_a_model_are_named(model, damage, named):
    damage(model)
    with pytest.raises(ModelError) as error:
        model_folder(str(model))
    assert all(name in str(error.value) for name in (str(model), *named))


def test_a_tokenizer_that_is_none_is_refused(model):
    (model / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelError, match="tokenizer of"):
        load_tokenizer(model)


def test_a_file_is_no_model(tmp_path, capsys):
    (tmp_path / "weights").touch()
    assert "is a file" in refused(capsys, "init", str(tmp_path / "new"), "--model", str(tmp_path / "weights"))
    assert not (tmp_path / "new").exists()


def test_paths_that_cannot_be_written_are_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(capsys, "init", str(tmp_path / "file"))
    assert str(tmp_path / "file") in refused(capsys, "init", str(tmp_path / "file" / "below"))


def test_a_root_that_is_a_file_is_refused(tmp_path, toy_model_dir, toy_dataset, capsys):
    (tmp_path / "root").touch()
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "workflow": "math_agent:agent",
                "name": "x",
                "train_dataset": {"path": str(toy_dataset), "split": "train", "total_steps": 1},
                "model": {"model_path": str(toy_model_dir), "max_model_len": 64, "max_tokens": 4},
                "checkpoint_root_dir": str(tmp_path / "root"),
            }
        )
    )
    (tmp_path / "agent.py").write_text("async def run(task, model):\n    return 1.0\n")
    said = refused(capsys, "run", "--config", str(tmp_path / "run.yaml"), "--set", f"workflow={tmp_path}/agent.py:run")
    assert str(tmp_path / "root") in said
    assert "checkpoint_root_dir" in said


@pytest.mark.parametrize("text", ["a: " + "[" * 800 + "]" * 800, "a: &x [*x]\n"], ids=["deep", "cyclic"])
def test_a_file_that_is_nested_too_deep_is_refused(tmp_path, capsys, text):
    (tmp_path / "run.yaml").write_text(text)
    refused(capsys, "run", "--config", str(tmp_path / "run.yaml"))


def test_a_setting_that_is_nested_too_deep_is_refused(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("")
    said = refused(capsys, "run", "--config", str(tmp_path / "run.yaml"), "--set", "seed=" + "[" * 800)
    assert len(said) < 400


def test_a_file_of_the_user_that_exits_is_said(tmp_path):
    """Its exit code 0 would be taken for that of a run that went well."""
    (tmp_path / "leaves_early.py").write_text("import sys\ndef run(task): ...\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"leaves_early\.py fails when it is imported: SystemExit: 0"):
        import_function(f"{tmp_path}/leaves_early.py:run")


@pytest.mark.parametrize(
    ("vary", "named"),
    [("seed=[", "not YAML"), ("seed=1,,2", "commas"), ("seed=0:inf", "finite"), ("name=a,b", "name cannot be varied")],
)
def test_what_cannot_be_varied_is_said_before_a_run(tmp_path, capsys, vary, named):
    (tmp_path / "run.yaml").write_text("")
    said = refused(capsys, "sweep", "--config", str(tmp_path / "run.yaml"), "--vary", vary)
    assert vary in said
    assert named in said


def test_a_seed_that_no_run_takes_is_said_before_the_first_run(tmp_path, capsys, model, toy_dataset):
    settings = {"train_dataset": {"path": str(toy_dataset)}, "model": {"model_path": str(model), "max_model_len": 64}}
    (tmp_path / "run.yaml").write_text(json.dumps({"workflow": "agent.py:run", **settings}))
    said = refused(capsys, "seeds", "--config", str(tmp_path / "run.yaml"), "--seeds", "0,-1")
    assert "seed" in said
    assert "-1" in said


@pytest.mark.parametrize(
    "words",
    [
        ["report", "--price-per-hour", "nan"],
        ["compare", "a", "b", "--price-per-hour", "-1"],
        ["view", "--price-per-hour", "inf"],
        ["view", "--port", "70000"],
        ["export", "--for", "sft", "--to", "x", "--min-reward", "nan"],
        ["sweep", "--config", "x", "--vary", "seed=1,2", "--seed", "-1"],
    ],
)
def test_a_number_that_is_none_is_refused(words, capsys):
    """Money, a port, a reward that every comparison would be false with."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_a_name_that_no_folder_can_have_is_refused(tmp_path, capsys):
    assert "name another folder" in refused(capsys, "init", str(tmp_path / ("x" * 300)), "--model", "some/model")


def test_a_folder_is_no_place_for_a_report(tmp_path, capsys):
    make_run(tmp_path / "run", Maker(size=RunSize(steps=1, batch_size=1, group_size=2, tasks=2, held_out=2)))
    for place in ("", str(tmp_path)):
        assert "--output" in refused(capsys, "report", str(tmp_path / "run"), "--output", place)
