"""What is a secret, and what is not: by names, by values, in texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sharpen.config.load import resolve, shown_settings, write_config, write_resolved
from sharpen.config.secrets import HIDDEN, hidden_names, hide, hide_in_urls, hide_in_value, hide_settings
from sharpen.errors import ConfigError
from sharpen.run.same_run import RunRecord, check_same_run, read_recorded

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
    "PGPASSWORD": "p",
    "MYSQL_PWD": "p",
    "dbpasswd": "p",
    "pw": "p",
    "pwd": "p",
    "session_cookie": "sid=1",
    "session_token": "x",
    "session_key": "550e8400-e29b-41d4-a716-446655440000",
    "account_key": "Eby8vdM02xNOcqFlqUwJ/uVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "MY_TOKEN": "made-of-words-0123456789",
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
    "model_key": "Qwen/Qwen2.5-0.5B-Instruct",
    "base_key": "internlm/internlm2-chat-1_8b",
    "primary_key": "id_of_customer_0001",
    "token": "Experiment-20261123093338",
    "field_key": "question_text_2024_en",
    "session_key": "experiment",
    "service_key": "name",
    "cookie_name": "sid",
    "PWD": "/home/me",
    "served_at": "https://host:8000/files/a@b",
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


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("postgresql://u:pa#ss@h/db", "postgresql://***@h/db"),
        ("postgresql://u:p/a?s'\" s@h:5432/db?sslmode=on", "postgresql://***@h:5432/db?sslmode=on"),
        ("postgresql://u:12/34@h1:5432,h2:5432/db", "postgresql://***@h1:5432,h2:5432/db"),
        ("https://u:pa#ss@h/v1", "https://***@h/v1"),
        ("https://h:8000/a@b", "https://h:8000/a@b"),
        ("https://h/v1?mail=a:b@c", "https://h/v1?mail=a:b@c"),
        ("postgresql://h:5432/db", "postgresql://h:5432/db"),
    ],
)
def test_a_password_in_the_url_of_a_setting_may_have_any_character(value, shown):
    """Red before: the password of the first stood in resolved.json."""
    assert hide_in_value(value) == shown
    given = {**GIVEN, "mode": "explore", "name": "n", "exchange": value, "workflow_args": {"db": value}}
    config = resolve(given).config
    assert {shown_settings(config)[name] for name in ("exchange", "workflow_args.db")} == {shown}
    with pytest.raises(ConfigError) as refused:
        resolve({**given, "mode": "both"})
    assert shown in str(refused.value).replace("\\'", "'")


def test_a_long_password_of_any_characters_is_taken_out_of_texts():
    resolve(GIVEN, {"workflow_args": {"db": "postgresql://u:long#pass/word@h/db"}})
    assert hide("cannot log in with long#pass/word") == "cannot log in with ***"


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


def noted(tmp_path: Path, arguments: dict[str, object], **before: object) -> tuple[RunRecord, dict]:
    """Write resolved.json, with entries replaced by what an earlier version wrote; return the record, and the file."""
    file = tmp_path / "resolved.json"
    write_resolved(file, resolve({**GIVEN, "workflow_args": arguments}))
    entries = json.loads(file.read_text())
    for name, value in before.items():
        entries[f"workflow_args.{name}"] = {"value": value, "origin": "run.yaml"}
    file.write_text(json.dumps(entries))
    record = read_recorded(tmp_path)
    assert record is not None
    return record, entries


def now(arguments: dict[str, object]) -> RunRecord:
    return RunRecord.of(resolve({**GIVEN, "workflow_args": arguments}).config, {})


ARGUMENTS = {
    "key": "550e8400-e29b-41d4-a716-446655440000",
    "headers": [{"Authorization": "Bearer abcdefgh", "Accept": "json"}],
    "db": "postgresql://u:pa#ss@h/db",
}


def test_a_run_that_goes_on_notices_another_value_behind_the_stars(tmp_path):
    """Red before: another key, header or password went unnoticed."""
    before, entries = noted(tmp_path, ARGUMENTS)
    assert not any(secret in json.dumps(entries) for secret in ("550e8400", "abcdefgh", "pa#ss"))
    assert check_same_run(tmp_path, before, now(ARGUMENTS)) == []
    for name, value in {
        "key": "550e8400-e29b-41d4-a716-446655440001",
        "headers": [{"Authorization": "Bearer ijklmnop", "Accept": "json"}],
        "db": "postgresql://u:qrst@h/db",
    }.items():
        (line,) = check_same_run(tmp_path, before, now({**ARGUMENTS, name: value}))
        assert f"workflow_args.{name}" in line
        assert not any(secret in line for secret in ("550e8400", "ijklmnop", "qrst"))
    for name, value in {
        "key": None,
        "headers": [{"Authorization": "Bearer ijklmnop", "Accept": "text"}],
        "db": "postgresql://u:pa#ss@elsewhere/db",
    }.items():
        with pytest.raises(ConfigError, match=f"workflow_args.{name}"):
            check_same_run(tmp_path, before, now({**ARGUMENTS, name: value}))


def test_a_run_of_before_goes_on_though_it_noted_only_stars(tmp_path):
    """Also for values that were hidden then, and are not now; what it noted openly is hidden now."""
    arguments = {**ARGUMENTS, "model_key": "Qwen/Qwen2.5-0.5B-Instruct", "PGPASSWORD": "abc"}
    before, _ = noted(
        tmp_path,
        arguments,
        key=HIDDEN,
        headers=[{"Authorization": HIDDEN, "Accept": "json"}],
        db=ARGUMENTS["db"],
        model_key=HIDDEN,
        PGPASSWORD="abc",
    )
    assert check_same_run(tmp_path, before, now(arguments)) == []
    before, _ = noted(tmp_path, arguments)
    with pytest.raises(ConfigError, match=r"model_key.*Qwen3"):
        check_same_run(tmp_path, before, now({**arguments, "model_key": "Qwen/Qwen3-0.6B"}))


def test_a_configuration_with_names_of_models_and_fields_can_be_used_again():
    arguments = {"model_key": "Qwen/Qwen2.5-0.5B-Instruct", "session_key": "experiment", "key": "id_of_customer_0001"}
    assert hidden_names(hide_settings({"workflow_args": arguments})) == []


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
