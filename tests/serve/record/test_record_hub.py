"""`sharpen export --for hub`: the whole upload, by the real client, against a hub of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from fake_hub import TOKEN, fake_hub
from huggingface_hub import HfApi
from reported_runs import make_run

from sharpen.errors import ConfigError
from sharpen.serve.record.model_export import to_hub


@pytest.fixture
def model(toy_model_dir, tmp_path):
    """A model with the state of its trainer, which stays here."""
    folder = shutil.copytree(toy_model_dir, tmp_path / "global_step_3")
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A model\n")
    (folder / "trainer_state").mkdir()
    (folder / "trainer_state" / "optimizer.pt").write_bytes(b"large")
    return folder


def files_of(model):
    return {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}


def export(run, hub, token):
    """Run the command in a process of its own, since the client reads its environment when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "sharpen.cli.main", "export", str(run), "--for", "hub", "--to", "me/model"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_command_uploads_every_file_of_the_model(model, tmp_path):
    """The weights as a large file; nothing of the trainer's."""
    run = make_run(tmp_path, {"test/0": (("a", 0.0), ("b", 1.0))})
    model.rename(run / "global_step_3")
    with fake_hub() as hub:
        done = export(run, hub, TOKEN)
        assert (done.returncode, done.stdout) == (0, f"{run / 'global_step_3'} is in {hub.address}/me/model\n")
        assert hub.files == files_of(run / "global_step_3")
        assert {"config.json", "tokenizer.json", "model.safetensors", "README.md"} <= hub.files.keys()
        assert list(hub.blobs.values()) == [hub.files["model.safetensors"]]
        assert (hub.made["organization"], hub.made["name"]) == ("me", "model")
        assert hub.made.get("visibility") == "private" or hub.made.get("private") is True


def test_a_refused_token_is_one_line_and_exit_code_2(model, tmp_path):
    run = make_run(tmp_path, {"test/0": (("a", 0.0), ("b", 1.0))})
    model.rename(run / "global_step_3")
    with fake_hub() as hub:
        done = export(run, hub, "hf_wrong")
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("sharpen: 'me/model' could not be uploaded: ")
        assert all(word in line for word in ("401", "Invalid username or password", "hf auth login"))
        assert (hub.made, hub.files) == ({}, {})


def test_small_models_are_uploaded_by_the_client_as_it_is_installed(model):
    """With its own uploader for large files, of which there are none here."""
    with fake_hub(large=".none") as hub:
        assert to_hub(model, "me/model", HfApi(hub.address, TOKEN)) == f"{hub.address}/me/model"
        assert hub.files == files_of(model)


def test_what_the_hub_refuses_later_is_said(model):
    with fake_hub(large=".none", fault=403) as hub, pytest.raises(ConfigError, match=r"403.*quota.*hf auth login"):
        to_hub(model, "me/model", HfApi(hub.address, TOKEN))


def test_a_hub_that_is_not_there_is_said(model):
    """Red where only the hub's own errors were expected: its HTTP client has others."""
    with fake_hub() as hub:
        address = hub.address
    with pytest.raises(ConfigError, match=r"me/model.*Connection refused"):
        to_hub(model, "me/model", HfApi(address, TOKEN))


def test_a_name_that_the_hub_does_not_take_is_said(model):
    with pytest.raises(ConfigError, match="a/b/c"):
        to_hub(model, "a/b/c", HfApi("http://127.0.0.1:9", TOKEN))
