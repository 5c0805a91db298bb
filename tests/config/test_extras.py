"""How a missing extra is installed: beside the copy that runs, never a stranger's package of the same name."""

import tomllib
from pathlib import Path

import pytest

from sharpen.config.extras import command_for, install_command

HERE = Path("/home/me")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'sharpen[ray]'"),
        ({"url": "file:///home/me", "dir_info": {"editable": True}}, "pip install -e '.[ray]'"),
        ({"url": "file:///opt/sharpen", "dir_info": {"editable": True}}, "pip install -e '/opt/sharpen[ray]'"),
        ({"url": "file:///opt/a%20b", "dir_info": {}}, "pip install '/opt/a b[ray]'"),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'sharpen[ray] @ git+https://host/x.git@abc'",
        ),
        (
            {"url": "file:///tmp/sharpen-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'sharpen[ray] @ file:///tmp/sharpen-0.1.0-py3-none-any.whl'",
        ),
    ],
)
def test_the_command_names_what_is_installed(origin, command):
    assert command_for("ray", origin, HERE) == command


def test_this_clone_names_itself():
    root = Path(__file__).parents[2]
    assert install_command("vllm") in ("pip install -e '.[vllm]'", f"pip install -e '{root}[vllm]'")


def test_the_extras_that_messages_name_exist():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"vllm", "ray", "lora", "math", "wandb", "mlflow", "swanlab", "trackio", "completion"} <= extras.keys()
