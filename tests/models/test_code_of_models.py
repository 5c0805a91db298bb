"""Code in the folder of a model or a dataset is never run, and nobody is asked whether it may be."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sharpen
from sharpen.cli.main import main
from sharpen.config.public import DatasetConfig
from sharpen.config.rows import load_tasks
from sharpen.errors import DatasetError, ModelError
from sharpen.learning.trainer.model import read_module
from sharpen.models.configuration import load_tokenizer, read_config
from sharpen.models.images import eyes_of

OWN = {
    **dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoImageProcessor", "AutoProcessor"), "evil.Evil"),
    "AutoTokenizer": ["evil.Evil", "evil.Evil"],
}
LOADS = re.compile(r"(?<!\{)\b(?:Auto[A-Z]\w+|class_for\(.*\))\.from_(?:pretrained|config)\(")
UNPICKLES = re.compile(r"\b((?:torch|c?pickle|cloudpickle|np|numpy|joblib|dill|marshal)\.load)\(")


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """The file that is there if code has run."""
    return tmp_path / "ran"


@pytest.fixture
def folder(toy_model_dir: Path, tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose folder has code; whoever is asked says yes."""
    folder = shutil.copytree(toy_model_dir, tmp_path / "model")
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n\nclass Evil:\n    pass\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return folder


def change(file: Path, **entries: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **entries}))


def answers() -> int:
    """How many of the answers on standard input were read."""
    return 9 - len(sys.stdin.read().splitlines())


def test_a_model_of_another_kind_is_refused(folder: Path, ran: Path) -> None:
    """Red with the argument left out: the yes on standard input ran it."""
    change(folder / "config.json", model_type="evil", auto_map=OWN)
    for read in (read_config, lambda source: read_module(source, "cpu")):
        with pytest.raises(ModelError, match="code of its own folder"):
            read(folder)
    assert (ran.exists(), answers()) == (False, 0)


def test_a_known_kind_is_loaded_by_the_classes_of_transformers(folder: Path, ran: Path) -> None:
    change(folder / "config.json", auto_map=OWN)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": OWN["AutoTokenizer"]})
    assert type(read_config(folder)).__name__ == "Qwen3Config"
    assert type(read_module(folder, "cpu")).__name__ == "Qwen3ForCausalLM"
    assert load_tokenizer(folder).vocab_size
    assert (ran.exists(), answers()) == (False, 0)


def test_an_image_processor_of_its_own_is_refused(folder: Path, ran: Path) -> None:
    settings = {"auto_map": OWN, "image_processor_type": "Evil", "processor_class": "Evil"}
    for name in ("preprocessor_config.json", "processor_config.json"):
        change(folder / name, **settings)
    change(folder / "config.json", model_type="qwen3_vl", vision_config={}, text_config={}, auto_map=OWN)
    with pytest.raises(ModelError):
        eyes_of(folder, read_config(folder))
    assert (ran.exists(), answers()) == (False, 0)


@pytest.mark.parametrize("words", [["models"], ["plan", "--config"], ["serve"], ["check", "--config"]])
def test_commands_say_so_in_one_line(
    folder: Path, ran: Path, words: list[str], tmp_path: Path, toy_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "config.json", model_type="evil", auto_map=OWN)
    (tmp_path / "agent.py").write_text("async def answer(task, model):\n    return 1.0\n")
    (tmp_path / "run.yaml").write_text(
        f"workflow: agent.py:answer\ncheckpoint_root_dir: {tmp_path / 'runs'}\n"
        f"train_dataset: {{path: {toy_dataset}}}\nmodel: {{model_path: {folder}, max_model_len: 64}}\n"
    )
    assert main([*words, str(tmp_path / "run.yaml" if words[-1] == "--config" else folder)]) == 2
    error = capsys.readouterr().err
    assert "code of its own folder" in error
    assert "trust_remote_code" not in error
    assert (ran.exists(), answers()) == (False, 0)


def test_weights_that_are_pickled_are_not_read(folder: Path, ran: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cbuiltins\nopen\n(V" + str(ran).encode() + b"\nVw\ntR.")
    with pytest.raises(ModelError, match="cannot be loaded"):
        read_module(folder, "cpu")
    assert not ran.exists()


def test_a_dataset_with_a_script_is_refused(tmp_path: Path, ran: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(DatasetError):
        load_tasks(DatasetConfig(path=str(folder)))
    assert not ran.exists()


def test_every_loader_of_transformers_is_told() -> None:
    """The class: whoever loads something by transformers says that no code of the folder is run."""
    untold = []
    for file, text in sources():
        for call in LOADS.finditer(text):
            depth, end = 1, call.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            if "trust_remote_code=False" not in text[call.end() : end]:
                untold.append(f"{file}: {call[0]}")
    assert untold == []


def test_nothing_is_unpickled_from_a_file() -> None:
    """`torch.load`, `pickle.load` and their kind are nowhere."""
    assert [f"{file}: {call[0]}" for file, text in sources() for call in UNPICKLES.finditer(text)] == []


def sources() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each file of the package."""
    root = Path(sharpen.__file__).parent
    for file in root.rglob("*.py"):
        yield str(file.relative_to(root)), file.read_text(encoding="utf-8")
