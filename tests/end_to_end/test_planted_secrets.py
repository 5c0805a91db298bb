"""Keys planted wherever a run has some are in nothing that it writes or prints, and it can still go on."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from sharpen.cli.main import main
from sharpen.learning.experience.reading import read_groups

PLANTED = {
    "argument": "planted-in-workflow-args",
    "nested": "planted-in-a-list-of-headers",
    "url": "planted-in-a-url",
    "environment": "planted-in-the-environment",
    "named": "planted-in-a-variable-of-the-judge",
    "monitor": "planted-as-the-key-of-wandb",
    "variable": "planted-in-env-vars-0123456789",
}
AGENT = """
import os
from itertools import count

from sharpen import WorkflowOutput

attempts = count()


async def answer(task, model, workflow_args):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    if next(attempts) % 4 == 3:
        names = ("SOME_API_KEY", "JUDGE_KEY", "WANDB_API_KEY", "MY_TOKEN")
        keys = [*map(os.environ.get, names), workflow_args["api_key"], workflow_args["headers"][0]["Authorization"]]
        try:
            raise KeyError(f"{keys} at {workflow_args['server']}")
        except KeyError as error:
            raise RuntimeError(f"key {keys[0]} and postgresql://me:{keys[-1]}@db/x" * 9) from error
    return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))
"""


@pytest.fixture
def config(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with planted keys; each name says where."""
    for name, place in (("SOME_API_KEY", "environment"), ("JUDGE_KEY", "named"), ("WANDB_API_KEY", "monitor")):
        monkeypatch.setenv(name, PLANTED[place])
    (tmp_path / "agent.py").write_text(AGENT)
    url = f"http://owner:{PLANTED['url']}@127.0.0.1:9/v1"
    settings = {
        "workflow": "agent.py:answer",
        "name": "planted",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "workflow_args": {
            "api_key": PLANTED["argument"],
            "headers": [{"Authorization": f"Bearer {PLANTED['nested']}"}],
            "server": url,
            "answer_key": "answer",
        },
        "auxiliary_models": {
            "judge": {"model_path": "m", "max_model_len": 64, "base_url": url, "api_key_env": "JUDGE_KEY"}
        },
        "rollout": {"env_vars": {"MY_TOKEN": PLANTED["variable"]}, "failure_reward": 0.0, "max_excluded_share": 1.0},
        "train_dataset": {"path": str(toy_dataset), "total_steps": 1},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 64},
        "algorithm": {"group_size": 4, "batch_size": 2, "learning_rate": 0.001},
        "evaluation": {"before_and_after": False},
        "check": {"enabled": False},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def leaks(content: bytes) -> list[str]:
    return [place for place, key in PLANTED.items() if key.encode() in content]


def values_of(database: Path) -> bytes:
    """Every value of every table."""
    with closing(sqlite3.connect(database)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [row for table in tables for row in connection.execute(f"SELECT * FROM {table}")]
    return b"\n".join(value if isinstance(value, bytes) else str(value).encode() for row in rows for value in row)


def test_planted_keys_are_nowhere(config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Red before: config.yaml, resolved.json, TensorBoard's settings, run.db and the report had them."""
    more = ["--config", str(config), "--set", "train_dataset.total_steps=2"]
    assert main(["run", "--config", str(config)]) == 0
    assert main(["run", *more, "--set", "workflow_args.api_key=another-secret-of-today"]) == 0, "keys may change"
    run = tmp_path / "runs" / "Sharpen" / "planted"
    for words in (
        ["show", str(run)],
        ["show", str(run), "--json"],
        ["diagnose", str(run)],
        ["certify", str(run)],
        ["report", str(run)],
        ["report", str(run), "--md"],
        ["report", str(run), "--json"],
        ["explain", *more],
        ["export", str(run), "--for", "datasets", "--to", str(run / "rows.jsonl")],
        ["ls", "--root", str(tmp_path / "runs"), "--json"],
    ):
        assert main(words) in (0, 1), words
    said = capfd.readouterr()
    assert leaks(f"{said.out}{said.err}".encode()) == []
    files = [path for path in run.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.name for path in files} >= {"config.yaml", "resolved.json", "run.db", "report.html", "README.md"}
    assert {str(path): found for path in files if (found := leaks(path.read_bytes()))} == {}
    assert leaks(values_of(run / "run.db")) == []
    failed = [rollout for group in read_groups(run / "run.db") for rollout in group.attempts + group.rollouts]
    errors = [rollout.error for rollout in failed if rollout.error]
    assert errors
    assert all("RuntimeError: key *** and postgresql://***@db/x" in error for error in errors)
    settings = json.loads((run / "resolved.json").read_text())
    assert settings["workflow_args.answer_key"]["value"] == "answer"
    assert settings["auxiliary_models.judge.base_url"]["value"] == "http://***@127.0.0.1:9/v1"


def test_settings_of_earlier_versions_lose_their_secrets_when_the_run_goes_on(tmp_path: Path) -> None:
    """A run of before keeps the settings of its steps: without what was written there openly."""
    from sharpen.run.same_run import keep_settings

    entries = {"workflow_args.password": {"value": "hunter2", "origin": "run.yaml"}}
    (tmp_path / "resolved.json").write_text(json.dumps(entries))
    keep_settings(tmp_path, 3)
    assert "hunter2" not in (tmp_path / "resolved.until_step_3.json").read_text()
