"""`sharpen init`: what it writes runs, is tested, and overwrites nothing."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from starter_checks import check_starter

from sharpen.cli.main import main
from sharpen.cli.starter.folder import FRAMEWORKS, variant, write_starter
from sharpen.cli.starter.tasks import rows
from sharpen.cli.starter.tiny_model import make_tiny_model


@pytest.mark.parametrize("framework", ["openai", "tools", "langgraph", "command"])
def test_the_folder_trains_a_step(framework, tmp_path, toy_model_dir):
    check_starter(tmp_path, toy_model_dir, framework)


@pytest.mark.parametrize(("framework", "count"), [("openai", 3), ("tools", 5)])
def test_its_own_tests_pass(tmp_path, framework, count):
    write_starter(tmp_path, framework, "some/model")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} passed" in done.stdout


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "judge.py").write_text("mine")
    assert main(["init", str(tmp_path), "--model", "some/model"]) == 2
    assert "judge.py" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["judge.py"]
    assert (tmp_path / "judge.py").read_text() == "mine"


def test_a_named_model_gets_settings_for_a_real_one(tmp_path, capsys):
    import yaml

    assert main(["init", str(tmp_path / "new"), "--model", "Qwen/Qwen3-0.6B", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "Qwen/Qwen3-0.6B"
    assert set(answer["files"]) == {str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*.*")}
    settings = yaml.safe_load((tmp_path / "new/run.yaml").read_text())
    assert settings["model"] == {"model_path": "Qwen/Qwen3-0.6B", "max_model_len": 4096, "max_tokens": 512}
    assert settings["algorithm"]["learning_rate"] == 1e-6
    assert "Qwen3" not in answer["commands"][0]


def test_what_is_missing_is_installed_first(tmp_path, capsys):
    """Of what the agent needs, only what is not here is named."""
    assert main(["init", str(tmp_path / "a"), "--from", "agentscope", "--model", "some/model"]) == 0
    assert "pip install 'agentscope>=2.0.3,<3'" in capsys.readouterr().out
    assert main(["init", str(tmp_path / "b"), "--from", "langgraph", "--model", "some/model"]) == 0
    assert "pip install" not in capsys.readouterr().out
    assert version("langgraph")


def test_agentscope_is_the_line_that_is_installed(tmp_path, monkeypatch):
    assert variant("agentscope") == "agentscope2"
    (tmp_path / "agentscope-1.0.21.dist-info").mkdir()
    (tmp_path / "agentscope-1.0.21.dist-info/METADATA").write_text("Name: agentscope\nVersion: 1.0.21\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert variant("agentscope") == "agentscope1"


def test_every_framework_has_an_agent():
    from sharpen.cli.starter import folder

    for framework in FRAMEWORKS:
        assert (Path(folder.__file__).with_name("files") / variant(framework) / "agent.py").exists()


def test_held_out_sums_are_not_trained_on():
    splits = rows()
    pairs = {split: {tuple(filter(str.isdigit, row["question"])) for row in some} for split, some in splits.items()}
    assert {split: len(some) for split, some in splits.items()} == {"train": 180, "test": 120}
    assert not pairs["train"] & pairs["test"]


def test_a_tiny_model_is_the_same_for_the_same_seed(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    one, two = (make_tiny_model(tmp_path / name, steps=1) for name in ("one", "two"))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(one)
    assert len(tokenizer.encode("17", add_special_tokens=False)) == 2, "a token for each digit"
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    assert AutoModelForCausalLM.from_pretrained(one).num_parameters() < 200_000


def test_a_model_with_tools_is_taught_what_its_agent_sends(tmp_path):
    """Its template is one whose calls are read, and a conversation with a call fits into the settings of `run.yaml`."""
    import runpy

    import yaml
    from transformers import AutoTokenizer

    from sharpen.cli.starter.tiny_model import encode
    from sharpen.config.public import TunerModelConfig
    from sharpen.gateway.formats.hermes import HERMES
    from sharpen.placement.model_formats import model_formats

    folder = write_starter(tmp_path, "tools", None).folder
    path = make_tiny_model(folder / "model", steps=1, tools=True)
    settings = yaml.safe_load((folder / "run.yaml").read_text())["model"]
    model = TunerModelConfig(**settings | {"model_path": str(path)})
    assert model_formats(model, path).tool is HERMES
    agent = runpy.run_path(str(folder / "agent.py"))
    call = {"name": "calculator", "arguments": {"expression": "9 + 9"}}
    messages = [
        {"role": "system", "content": agent["SYSTEM"]},
        {"role": "user", "content": "How much is 9 plus 9?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": agent["calculator"](json.dumps(call["arguments"]))},
        {"role": "assistant", "content": "18"},
    ]
    lesson = encode(AutoTokenizer.from_pretrained(path), messages, agent["TOOLS"])
    first = lesson.said.index(True)
    assert lesson.said.index(False, first) - first < model.max_tokens, "tokens of a call"
    assert len(lesson.ids) + model.max_tokens < model.max_model_len


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["openai", "tools"])
def test_the_tiny_model_learns_the_tasks(tmp_path, framework):
    """As a stranger would: `init`, `check`, `run`; less than the ten minutes that the documentation promises."""
    sharpen = [sys.executable, "-m", "sharpen.cli.main"]

    def call(*words: str, folder: Path) -> None:
        subprocess.run([*sharpen, *words], cwd=folder, env=os.environ, check=True)

    call("init", "first", "--from", framework, folder=tmp_path)
    call("check", "--config", "run.yaml", folder=tmp_path / "first")
    call("run", "--config", "run.yaml", "--set", "name=run", folder=tmp_path / "first")
    summary = json.loads((tmp_path / "first/checkpoints/Sharpen/run/summary.json").read_text())
    assert summary["before"]["greedy"]["accuracy"] < 0.4
    assert summary["verdict"]["kind"] == "better"
