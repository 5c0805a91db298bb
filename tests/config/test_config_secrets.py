"""What is a secret, and what is not: by names, by values, in texts."""

from __future__ import annotations

import json

import pytest
import yaml

from sharpen.config.load import resolve, shown_settings, write_config, write_resolved
from sharpen.config.secrets import HIDDEN, hide, hide_in_urls, hide_settings
from sharpen.errors import ConfigError

MODEL = {"model_path": "m", "max_model_len": 64}
GIVEN = {"train_dataset": {"path": "d"}, "model": MODEL}
RANDOM = "k3y-0123456789abcdef"

SECRET = {
    "api_key": "short",
    "OPENAI_API_KEY": "sk-1",
    "apiKeys": ["a", "b"],
    "dbPassword": "hunter2",
    "password": 1234,
    "client_secret": "x",
    "access_token": "x",
    "Authorization": "Bearer x",
    "github_token": RANDOM,
    "tavily_key": RANDOM,
    "credentials": {"user": "me", "any": "thing"},
}
PLAIN = {
    "answer_key": "solution of the task",
    "messages_key": "messages",
    "stop_token": "</think>",
    "pad_token": "<|reserved_special_token_250|>",
    "max_tokens": 1234567890123456,
    "token_limit": RANDOM,
    "api_key_env": "JUDGE_KEY",
    "password_file": "/run/secret",
    "secret_word": "banana",
    "use_password": True,
    "key": None,
    "auth_token": "${oc.env:MY_TOKEN}",
    "url": "https://host:8000/v1?page=2",
}


@pytest.mark.parametrize("name", SECRET)
def test_values_of_these_names_are_hidden(name):
    shown = hide_settings({"workflow_args": {name: SECRET[name]}})["workflow_args"][name]
    leaves = shown.values() if isinstance(shown, dict) else shown if isinstance(shown, list) else [shown]
    assert set(leaves) == {HIDDEN}


@pytest.mark.parametrize("name", PLAIN)
def test_values_of_these_are_not(name):
    assert hide_settings({"workflow_args": {name: PLAIN[name]}}) == {"workflow_args": {name: PLAIN[name]}}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:pass@db/x", "postgresql://***@db/x"),
        ("https://token@host/v1", "https://***@host/v1"),
        ("https://me:a@b@host/v1 and http://h/@x", "https://***@host/v1 and http://h/@x"),
        ("postgresql://db/x?sslmode=on&password=abc", "postgresql://db/x?sslmode=on&password=***"),
        ('{"url": "http://h", "mail": "a@b"}', '{"url": "http://h", "mail": "a@b"}'),
        ("mailto a@b, see http://h/x.", "mailto a@b, see http://h/x."),
    ],
)
def test_what_stands_before_the_host_of_a_url_is_hidden(text, shown):
    assert hide_in_urls(text) == shown


def test_secrets_of_settings_and_environment_are_taken_out_of_texts(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "from-the-environment")
    monkeypatch.setenv("JUDGE", "named-by-a-setting")
    given = {
        "password": "correct horse",
        "api_key_env": "JUDGE",
        "header": {"authorization": "Bearer abcdefgh"},
        "short_password": "four",
        "dsn": "postgresql://me:p%40ssw0rd@h",
    }
    resolve(GIVEN, {"workflow_args": given})
    text = "correct horse from-the-environment named-by-a-setting abcdefgh four p@ssw0rd p%40ssw0rd horse"
    assert hide(text) == "*** *** *** *** four *** *** horse"


def test_what_is_written_of_a_run_has_its_settings_but_no_secret(tmp_path):
    given = {
        "auxiliary_models": {"judge": {**MODEL, "base_url": "https://me:hunter2@host/v1", "api_key_env": "JUDGE_KEY"}},
        "workflow_args": {"search": {"api_key": "hunter2"}, "answer_key": "answer"},
        "supervised": {"messages_key": "messages_of_version_20260101"},
        "rollout": {"env_vars": {"MY_TOKEN": RANDOM}},
    }
    resolved = resolve({**GIVEN, **given})
    write_resolved(tmp_path / "resolved.json", resolved)
    source = tmp_path / "run.yaml"
    source.write_text(yaml.safe_dump({**GIVEN, **given}))
    write_config(source, tmp_path / "config.yaml")
    for name in ("resolved.json", "config.yaml"):
        text = (tmp_path / name).read_text()
        assert "hunter2" not in text
        assert RANDOM not in text
        assert "https://***@host/v1" in text
        assert "JUDGE_KEY" in text
    shown = shown_settings(resolved.config)
    assert shown["workflow_args.answer_key"] == "answer"
    assert shown["supervised.messages_key"] == "messages_of_version_20260101", "a setting of ours is what it is called"
    assert json.loads((tmp_path / "resolved.json").read_text())["workflow_args.search.api_key"]["value"] == HIDDEN
    with pytest.raises(ConfigError, match=r"api_key.*MY_TOKEN|MY_TOKEN.*api_key"):
        resolve(yaml.safe_load((tmp_path / "config.yaml").read_text()))


def test_a_file_without_secrets_is_copied_as_it_is(tmp_path):
    text = "# a comment\nworkflow: a.py:b\nworkflow_args: {answer_key: answer}\n"
    (tmp_path / "run.yaml").write_text(text)
    write_config(tmp_path / "run.yaml", tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").read_text() == text


def test_overrides_are_told_without_secrets():
    file = {**GIVEN, "workflow_args": {"api_key": "hunter2"}, "exchange": None}
    lines = resolve(file, {"workflow_args.api_key": "hunter3"}).overrides
    assert lines
    assert "hunter" not in str(lines)
    with pytest.raises(ConfigError) as refused:
        resolve({**GIVEN, "exchange": "postgresql://me:hunter2@db/x"})
    assert "hunter2" not in str(refused.value)
