"""Trinity's agents that search: mails in a database, and the web by a service's MCP server (a tiny one here)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_scripts import call, tool_results, turns
from scripted_rollouts import Rollouts

from sharpen.agent.agentscope.model import present
from sharpen.agent.rollout.models import RolloutModels
from sharpen.compat.trinity import workflow_function
from sharpen.compat.trinity.task import TasksetConfig
from sharpen.compat.trinity.workflows.email_search import Mailbox
from sharpen.errors import ConfigError
from sharpen.types import Outcome, Rollout

MAILS = """
CREATE TABLE emails (id INTEGER PRIMARY KEY, message_id TEXT UNIQUE, subject TEXT, from_address TEXT, date TEXT,
    body TEXT, file_name TEXT);
CREATE TABLE recipients (email_id INTEGER, recipient_address TEXT, recipient_type TEXT);
CREATE VIRTUAL TABLE emails_fts USING fts5(subject, body, content='emails', content_rowid='id');
INSERT INTO emails VALUES
    (1, '<a>', 'Lunch', 'ann@x.com', '2001-05-01 12:00:00', 'We have "soup" at noon.', 'f1'),
    (2, '<b>', 'Lunch again', 'bob@x.com', '2001-05-02 23:59:00', 'Soup, or salad.', 'f2'),
    (3, '<c>', 'Lunch', 'bob@x.com', '2001-05-03 00:00:00', 'Soup on the third.', 'f3'),
    (4, '<d>', 'Lunch', 'eve@x.com', '2001-05-01 09:00:00', 'Soup of others.', 'f4');
INSERT INTO recipients VALUES (1, 'bob@x.com', 'to'), (2, 'ann@x.com', 'CC'), (2, 'joe@x.com', 'bcc'),
    (3, 'ann@x.com', 'to'), (4, 'joe@x.com', 'to');
INSERT INTO emails_fts (rowid, subject, body) SELECT id, subject, body FROM emails;
"""
MAIL_ROW = {
    "question": "What is there at noon?",
    "answer": "Soup.",
    "message_ids": ["<a>"],
    "inbox_address": "ann@x.com",
    "query_date": "2001-05-02 00:00:00",
}
WEB_ROW = {"question": "What is 6 + 1?", "answer": "7"}
KEYS = {"prompt_key": "question", "response_key": "answer"}


@pytest.fixture
def mails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mails of all.db"
    connection = sqlite3.connect(path)
    connection.executescript(MAILS)
    connection.close()
    monkeypatch.setenv("DEFAULT_EMAIL_DB_PATH", str(path))
    return path


class Judged(Rollouts):
    """Rollouts with an auxiliary model."""

    def __init__(self, policy: Rollouts, judge: Rollouts) -> None:
        super().__init__(policy.gateway, policy.engine)
        self.judge = judge.gateway

    def open(self, rollout_id: str, noise_seed: int) -> RolloutModels:
        models = {"judge": self.judge.open(rollout_id, 1, record=False)}
        return RolloutModels(self.gateway.open(rollout_id, noise_seed), models, present=present)


@pytest.fixture
def judged(rollouts: Any) -> Callable[..., Rollout]:
    """`judged(name, row, script, judgement)`: the only rollout of a task, with a judge that says the same always."""

    def run(name: str, row: dict[str, Any], script: Any, judgement: str, **workflow_args: Any) -> Rollout:
        function = workflow_function(name, TasksetConfig(**KEYS), workflow_args)
        (group,) = Judged(rollouts(script), rollouts(judgement)).run(function, tasks=[row])
        (rollout,) = group.rollouts
        return rollout

    return run


def test_a_search_finds_the_newest_mails_of_the_inbox_until_that_day(mails: Path) -> None:
    box = Mailbox()
    found = box.search("ann@x.com", ["soup", "lunch"], "2001-05-02")
    assert [mail["message_id"] for mail in found] == ["<b>", "<a>"]
    assert "<b>Lunch</b>" in found[0]["snippet"]
    assert [mail["message_id"] for mail in box.search("joe@x.com", "soup", "2001-05-03")] == ["<b>", "<d>"]
    assert box.search("ann@x.com", ['"soup" OR lunch'], "2001-05-02") == []
    assert len(box.search("ann@x.com", ['"soup'], "2001-05-02")) == 2
    mail = box.read("<b>")
    assert mail is not None
    assert (mail["cc_addresses"], mail["bcc_addresses"], mail["to_addresses"]) == (["ann@x.com"], ["joe@x.com"], [])
    assert (mail["subject"], mail["from_address"], mail["body"]) == ("Lunch again", "bob@x.com", "Soup, or salad.")
    assert box.read("<x>") is None
    for keywords, day in ([], "2001-05-02"), (["soup"], "May 2nd"):
        with pytest.raises(ValueError, match=r"keywords|May 2nd"):
            box.search("ann@x.com", keywords, day)


def test_a_database_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DEFAULT_EMAIL_DB_PATH", raising=False)
    with pytest.raises(ConfigError, match="DEFAULT_EMAIL_DB_PATH is not set"):
        Mailbox()
    monkeypatch.setenv("DEFAULT_EMAIL_DB_PATH", str(tmp_path / "no.db"))
    with pytest.raises(ConfigError, match=r"no\.db', where no file is"):
        Mailbox()


def looks_it_up(answer: str, *sources: str) -> Callable[[str], str]:
    """Searches, reads the oldest mail, and answers."""

    def script(prompt: str) -> str:
        results = tool_results(prompt)
        if not results:
            asked = {"inbox_address": "ann@x.com", "query_date": "2001-05-02", "keywords": ["soup"], "limit": 3}
            return call("search_emails", json.dumps(asked))
        if len(results) == 1:
            return call("read_email", json.dumps({"message_id": json.loads(results[0])[-1]["message_id"]}))
        final = {"response": "x", "answer": answer, "sources": sources}
        return "So it is. " + call("generate_response", json.dumps(final))

    return script


EMAIL = "email_search_workflow"


@pytest.mark.parametrize(
    ("answer", "sources", "judgement", "accuracy", "form"),
    [
        ("Soup", ["<a>"], "True.", 1.0, 1 + 0.3 + 0.1 + 0.1 * (1 - 3 / 5)),
        ("Soup", ["<b>", "<a>"], "true", 1.0, 1 + 0.3 + 0.05 + 0.04),
        ("Soup", [], "true", 1.0, 1.04),
        ("Salad", ["<b>"], "false", -1.0, 0.2),
        ("Salad", ["<a>"], "false", -1.0, 0.3),
        ("I don't know", [], "true", 0.0, 0.2),
        ("I don't know", [], "false", -1.0, 0.2),
        ("", [], "false", 0.0, 0.0),
    ],
)
def test_an_answer_from_mails_is_scored(
    judged: Any, mails: Path, answer: str, sources: list[str], judgement: str, accuracy: float, form: float
) -> None:
    rollout = judged(EMAIL, MAIL_ROW, looks_it_up(answer, *sources), judgement, max_turns=5)
    assert rollout.error is None
    assert rollout.metrics["accuracy"] == accuracy
    assert rollout.metrics["format"] == pytest.approx(form)
    assert rollout.reward == pytest.approx(accuracy + form)
    assert rollout.metrics["actual_turns"] == 3
    assert dict(rollout.call_rewards) == dict.fromkeys(range(3), rollout.reward)
    assert {"search_emails", "read_email"} <= {tool["function"]["name"] for tool in rollout.calls[0].tools}
    assert "ann@x.com. Today is 2001-05-02." in str(rollout.calls[0].messages[0]["content"])


def test_without_an_answer_or_a_judge(judged: Any, rollouts: Any, mails: Path) -> None:
    rollout = judged(EMAIL, MAIL_ROW, "I just talk.", "true", max_turns=2)
    assert (rollout.reward, rollout.metrics["format"], rollout.metrics["actual_turns"]) == (-1.0, -1.0, 3)
    compared = {"reward_fn_args": {"llm_as_a_judge": False}}
    plain = workflow_function(EMAIL, TasksetConfig(**KEYS, **compared), {})
    (group,) = rollouts(looks_it_up("soup")).run(plain, tasks=[MAIL_ROW])
    assert (group.rollouts[0].error, group.rollouts[0].reward) == (None, 1.0)
    with pytest.raises(ConfigError, match="EmailSearchWorkflow needs a judge"):
        rollouts("x").run(workflow_function(EMAIL, TasksetConfig(**KEYS), {}), tasks=[MAIL_ROW])


def test_a_judgement_that_cannot_be_read_is_no_score(judged: Any, mails: Path, service: None) -> None:
    rollout = judged(EMAIL, MAIL_ROW, looks_it_up("Soup"), "It depends.")
    assert rollout.outcome != Outcome.OK
    assert "neither true nor false: 'It depends.'" in str(rollout.error)
    rollout = judged(WEB, WEB_ROW, asks_the_web, "It depends.", search_client_type="tavily")
    assert "no line with 'Correctness: YES' or NO" in str(rollout.error)


def test_what_goes_wrong_with_a_tool_is_said_to_the_model(judged: Any, mails: Path) -> None:
    bad = {"inbox_address": "ann@x.com", "query_date": "today", "keywords": ["soup"]}
    says = turns(call("search_emails", json.dumps(bad)), call("read_email", '{"message_id": "<x>"}'), "I give up.")
    rollout = judged(EMAIL, MAIL_ROW, says, "true", max_turns=3)
    last = str(rollout.calls[-1].messages)
    assert "Error: the search failed: Invalid isoformat string: 'today'" in last
    assert "Error: there is no mail <x>." in last


WEB = "agentscope_v1_react_search_workflow"
BIN = Path(__file__).parents[1] / "as_it_is/stand_ins/bin"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    """`npx` starts a tiny MCP server."""
    monkeypatch.setenv("PATH", str(BIN), prepend=":")
    monkeypatch.setenv("TAVILY_API_KEY", "the key")
    monkeypatch.delenv("SEARXNG_URL", raising=False)


def asks_the_web(prompt: str) -> str:
    """Searches once, and answers with what was found."""
    results = tool_results(prompt)
    if not results:
        return call("search", '{"query": "6 + 1"}')
    return "Here. " + call("generate_response", json.dumps({"response": "x", "result": results[0]}))


@pytest.mark.parametrize(
    ("judgement", "reward"),
    [
        ("They agree.\n2. **Correctness**: YES", 1.0),
        ("Correctness: no", 0.0),
        ("YES or NO?\nCorrectness: NO, it is not YES\ncorrectness: yes", 1.0),
    ],
)
def test_an_answer_from_the_web_is_judged(judged: Any, service: None, judgement: str, reward: float) -> None:
    rollout = judged(WEB, WEB_ROW, asks_the_web, judgement, search_client_type="tavily", max_turns=4)
    assert (rollout.error, rollout.reward) == (None, reward)
    assert dict(rollout.call_rewards) == {0: reward, 1: reward}
    assert (rollout.metrics["max_turns"], rollout.metrics["react_turns"] > 0) == (4, True)
    assert "6 + 1: it is 7 (tavily-mcp@latest, the key)" in str(rollout.calls[1].messages)


def test_calls_that_are_too_long_are_not_trained(judged: Any, service: None) -> None:
    search = {"search_client_type": "tavily"}
    whole = judged(WEB, WEB_ROW, asks_the_web, "Correctness: YES", **search)
    lengths = [len(one.prompt_ids_P) + len(one.sampled_ids_S) for one in whole.calls]
    kept = judged(WEB, WEB_ROW, asks_the_web, "Correctness: YES", **search, max_model_tokens=max(lengths) - 1)
    assert (kept.reward, dict(kept.call_rewards)) == (1.0, {lengths.index(min(lengths)): 1.0})
    none = judged(WEB, WEB_ROW, asks_the_web, "Correctness: YES", **search, max_model_tokens=1)
    assert none.outcome != Outcome.OK
    assert "more than 1 tokens (workflow_args.max_model_tokens)" in str(none.error)


def test_what_a_search_needs_is_named(judged: Any, service: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"search_client_type is 'bing': it must be one of searxng, tavily"):
        judged(WEB, WEB_ROW, "x", "", search_client_type="bing")
    with pytest.raises(ConfigError, match="SEARXNG_URL is not set: the search service 'searxng'"):
        judged(WEB, WEB_ROW, "x", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"the npm package tavily-mcp@latest, which npx starts: install Node\.js"):
        judged(WEB, WEB_ROW, "x", "", search_client_type="tavily")


def test_a_search_needs_a_judge(rollouts: Any, service: None) -> None:
    with pytest.raises(ConfigError, match="AgentScopeV1ReactSearchWorkflow needs a judge"):
        rollouts("x").run(
            workflow_function(WEB, TasksetConfig(**KEYS), {"search_client_type": "tavily"}), tasks=[WEB_ROW]
        )
