"""`sharpen serve` as a command: what it serves, how it ends, and what it says to bad input."""

import json
import signal
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from processes import forked, line_of, python

from sharpen.cli.main import BAD_INPUT, main
from sharpen.errors import ConfigError, ModelError
from sharpen.serve.model import find_model, serving_config

ASK = [{"role": "user", "content": "question"}]


def started(process) -> dict[str, str]:
    """The lines until it serves, by what they begin with."""
    lines = {}
    while True:
        first, _, rest = line_of(process).partition(" ")
        lines[first] = rest
        if first == "serving":
            return lines


def test_a_model_is_served_to_both_vendors_clients_until_ctrl_c(toy_model_dir: Path):
    with python("-m", "sharpen.cli.main", "serve", str(toy_model_dir), "--port", "0", "--name", "mine") as process:
        lines = started(process)
        url, key = lines["serving"].split()[2], lines["key:"]
        client = openai.OpenAI(base_url=url, api_key=key)
        assert [one.id for one in client.models.list()] == ["mine"]
        reply = client.chat.completions.create(model="mine", messages=ASK, max_tokens=4)
        assert reply.usage is not None
        assert reply.usage.completion_tokens >= 1
        claude = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key)
        with claude.messages.stream(model="mine", max_tokens=4, messages=ASK) as stream:
            assert stream.get_final_message().usage.output_tokens >= 1
        assert client.responses.create(model="mine", input="question", max_output_tokens=16).status
        assert httpx.get(url.replace("/v1", "/health")).json()["model"] == "mine"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, process.stderr.read()
        assert process.stderr.read() == ""


def test_sigterm_ends_it_too_and_a_given_key_is_not_printed(toy_model_dir: Path, monkeypatch):
    monkeypatch.setenv("SHARPEN_API_KEY", "secret-of-mine")
    with forked("-m", "sharpen.cli.main", "serve", str(toy_model_dir), "--port", "0") as process:
        lines = started(process)
        client = openai.OpenAI(base_url=lines["serving"].split()[2], api_key="secret-of-mine")
        assert client.models.list().data
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "secret" not in str(lines) + output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "algorithm.group_size=3"], "algorithm.group_size"),
        (["--set", "model.model_path=x"], "model.model_path"),
        (["--set", "model.temprature=1"], "temperature"),
        (["--host", "nowhere"], "'nowhere'"),
        (["--host", "203.0.113.7"], "203.0.113.7"),
        (["--api-key", "two words"], "two words"),
        (["--max-model-len", "1"], "max_model_len"),
    ],
)
def test_bad_input_is_one_clear_message(options, message, toy_model_dir: Path, capsys):
    assert main(["serve", str(toy_model_dir), *options]) == BAD_INPUT
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_taken_port_is_bad_input(toy_model_dir: Path, capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(toy_model_dir), "--port", str(port)]) == BAD_INPUT
    assert str(port) in capsys.readouterr().err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 40_960}))
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_model_is_sampled_as_its_own_files_say_unless_told_otherwise(model: Path):
    found = find_model(str(model))
    assert found.name == "model"
    config = serving_config(found, {"model.top_k": 5}).config
    assert (config.model.temperature, config.model.top_k, config.model.top_p) == (0.6, 5, 0.95)
    assert (config.model.max_model_len, config.gateway.port) == (32_768, 8000)


def test_a_model_that_does_not_sample_has_our_defaults(model: Path):
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert serving_config(find_model(str(model)), {}).config.model.temperature == 1.0


def test_a_run_is_served_as_it_was_trained_from_its_best_checkpoint(model: Path, tmp_path: Path):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    with pytest.raises(ModelError, match=r"config\.json"):
        find_model(str(run))
    values = {"model.max_model_len": 777, "model.temperature": 0.8, "model.tool_call_parser": "hermes"}
    entries = {name: {"value": value, "origin": "run.yaml"} for name, value in values.items()}
    (run / "resolved.json").write_text(json.dumps(entries))
    with pytest.raises(ModelError, match="no checkpoint"):
        find_model(str(run))
    for step in (1, 2):
        (run / f"global_step_{step}").mkdir()
        (run / f"global_step_{step}" / "config.json").write_bytes((model / "config.json").read_bytes())
    (run / "latest").symlink_to("global_step_2")
    assert find_model(str(run)).folder.name == "global_step_2"
    (run / "best").symlink_to("global_step_1")
    found = find_model(str(run))
    assert (found.folder.name, found.name) == ("global_step_1", "mine")
    for path in (run, run / "best", run / "global_step_1"):
        config = serving_config(find_model(str(path)), {}).config
        assert (config.model.max_model_len, config.model.temperature) == (777, 0.8)
        assert config.model.tool_call_parser == "hermes"


def test_code_that_a_run_names_is_loaded_only_where_it_is_named_again(model: Path, tmp_path: Path):
    """A run's folder may be a stranger's, and lie where its settings say that its code is."""
    run = tmp_path / "theirs"
    (run / "global_step_1").mkdir(parents=True)
    (run / "latest").symlink_to("global_step_1")
    (run / "global_step_1" / "config.json").write_bytes((model / "config.json").read_bytes())
    named = f"{tmp_path}/evil.py:FORM"
    values = {"model.max_model_len": 777, "model.tool_call_parser": named, "families": [named]}
    entries = {name: {"value": value, "origin": "run.yaml"} for name, value in values.items()}
    (run / "resolved.json").write_text(json.dumps(entries))
    found = find_model(str(run))
    config = serving_config(found, {}).config
    assert (config.model.tool_call_parser, config.families, config.model.max_model_len) == ("auto", (), 777)
    assert f"""trust it: --set 'model.tool_call_parser="{named}"' --set 'families=["{named}"]')""" in found.origin
    assert serving_config(found, {"families": [named]}).config.families == (named,)


def test_adapters_alone_are_refused_by_what_to_do(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merged"):
        find_model(str(tmp_path))


def test_a_model_without_a_length_needs_one(model: Path):
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match="--max-model-len"):
        serving_config(find_model(str(model)), {})
    assert serving_config(find_model(str(model)), {"model.max_model_len": 99}).config.model.max_model_len == 99
