"""Which session a recorded call belongs to, and what applications say of sessions later."""

import time

import pytest

from sharpen.gateway.caller import new_key
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.recorded import read_open_sessions
from sharpen.serve.record.sessions import RecordedSessions
from sharpen.serve.record.upstream import Upstream
from sharpen.serve.visit import MAX_TOKENS

ASK = [{"role": "user", "content": "quest?"}]


def ask(recorder, key: str, path: str = "/v1/chat/completions") -> dict:
    reply = recorder.post(path, key=key, model="served", messages=ASK)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_session_has_a_key_of_its_own_which_the_server_never_sees(start):
    recorder = start(upstream_key="secret", key="secret")
    session = recorder.post("/sessions", task_id="t1", task={"question": "q"}).json()
    assert session["base_url"] == f"{recorder.url}/v1"
    ask(recorder, session["api_key"])
    ask(recorder, f"{session['api_key']}.planner")
    ask(recorder, "ignored", path=f"/{session['api_key']}/v1/chat/completions")
    ask(recorder, "the-key")
    assert {headers["authorization"] for headers in recorder.fake.headers} == {"Bearer secret"}
    assert recorder.post("/v1/chat/completions", key="another", messages=ASK).status_code == 401  # the server's own
    own, shared = recorder.rollouts()
    assert own.id == f"{session['id']}/t1/0"
    assert [call.agent for call in own.calls] == ["", "planner", ""]
    assert len(shared.calls) == 1
    assert "secret" not in repr(recorder.journal.path.read_bytes())


def test_calls_with_one_key_are_a_session_until_it_is_idle(start):
    recorder = start(idle_s=0.0)
    for key in ("a", "b", "a"):
        ask(recorder, key)
    assert [len(one.calls) for one in recorder.rollouts()] == [2, 1]
    recorder.thread.loop.call_soon_threadsafe(recorder.sessions.end_idle)
    while recorder.metric("sessions_open"):
        pass
    ask(recorder, "a")
    assert [len(one.calls) for one in recorder.rollouts()] == [2, 1, 1]
    assert recorder.metric("sessions_total") == 3


def test_feedback_is_written_at_once_for_open_and_for_ended_sessions(recorder):
    session = recorder.post("/sessions").json()
    first, second = ask(recorder, session["api_key"])["id"], ask(recorder, session["api_key"])["id"]
    assert recorder.post("/feedback", call=second, reward=0.25).json()["ended"] is False
    assert recorder.metric('requests_total{path="other",status="200"}') == 2  # the opening, and this
    assert recorder.post("/feedback", session=session["id"], reward=0.5).json()["ended"] is True
    (rollout,) = recorder.rollouts()
    assert (rollout.reward, rollout.call_rewards) == (0.5, {1: 0.25})
    assert recorder.post("/v1/chat/completions", key=session["api_key"], messages=ASK).status_code == 401
    assert recorder.post("/feedback", call=first, reward=1).json() == {
        "session": session["id"],
        "reward": 1.0,
        "ended": True,
    }
    (rollout,) = recorder.rollouts()
    assert (rollout.reward, rollout.call_rewards) == (1.0, {0: 1.0, 1: 0.25})


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/feedback", {"session": "none", "reward": 1}, 404),
        ("/feedback", {"call": "none", "reward": 1}, 404),
        ("/feedback", {"call": "x", "session": "y", "reward": 1}, 400),
        ("/feedback", {"session": 3, "reward": 1}, 400),
        ("/feedback", {"session": "x", "reward": "1"}, 400),
        ("/feedback", {"session": "x", "reward": 10**400}, 400),
        ("/feedback", {"session": "x", "reward": 1, "end": 1}, 400),
        ("/feedback", {"session": "x", "rewad": 1}, 400),
        ("/sessions", {"task_id": 3}, 400),
        ("/sessions", {"task_id": "x" * 201}, 400),
        ("/sessions", {"task": []}, 400),
    ],
)
def test_what_cannot_be_said_of_a_session_is_refused(recorder, path, body, status):
    reply = recorder.post(path, **body)
    assert (reply.status_code, bool(reply.json()["error"]["message"])) == (status, True)


def test_what_is_the_recorders_own_needs_its_key(recorder):
    for path in ("/sessions", "/feedback"):
        assert recorder.post(path, key="mine").status_code == 401
    assert recorder.get("/metrics", key="mine").status_code == 401
    assert recorder.get("/health", key="").json() == {"status": "ok", "upstream": recorder.upstream}
    assert recorder.fake.paths == []


def test_where_others_reach_it_calls_need_its_key_or_a_sessions(start):
    recorder = start(open_=False)
    assert recorder.post("/v1/chat/completions", key="mine", messages=ASK).status_code == 401
    assert recorder.post("/v1/models", key="").status_code == 401
    assert recorder.fake.paths == []
    ask(recorder, "the-key")
    ask(recorder, recorder.post("/sessions").json()["api_key"])


def test_sessions_are_bounded(recorder):
    session = recorder.post("/sessions").json()
    for key in (session["api_key"], "mine"):
        ask(recorder, key)
    for one in recorder.sessions._by_id.values():
        one.num_tokens = MAX_TOKENS
    refused = recorder.post("/v1/chat/completions", key=session["api_key"], messages=ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "session_full")
    ask(recorder, "mine")
    assert [len(one.calls) for one in recorder.rollouts()] == [1, 1, 1]
    assert recorder.metric("sessions_open") == 2


def test_a_recorder_that_starts_again_goes_on_with_open_sessions(start):
    before = start()
    session, other = before.post("/sessions", task_id="t").json(), before.post("/sessions").json()
    ask(before, session["api_key"])
    ask(before, "mine")
    before.post("/feedback", session=other["id"], end=True)
    before.journal.flush()
    assert [one.task.id for one in read_open_sessions(before.journal.path)] == ["t", ""]
    again = start()
    ask(again, session["api_key"])
    ask(again, "mine")
    assert again.post("/v1/chat/completions", key=other["api_key"], messages=ASK).status_code == 401
    assert [len(one.calls) for one in again.rollouts()] == [2, 0, 2]
    assert again.post("/feedback", session=other["id"], reward=1).status_code == 200
    assert again.rollouts()[1].reward == 1


def test_what_an_ended_session_said_is_not_kept_in_memory(recorder):
    session = recorder.post("/sessions").json()
    ask(recorder, session["api_key"])
    recorder.post("/feedback", session=session["id"], reward=1)
    assert not recorder.sessions._by_id
    assert not recorder.sessions._by_key


@pytest.mark.parametrize(
    ("url", "path", "target"),
    [
        ("http://h:1/v1", "/v1/models", "http://h:1/v1/models"),
        ("http://h:1", "/v1/models", "http://h:1/v1/models"),
        ("http://h:1/v1/", "/version", "http://h:1/version"),
        ("https://h/api/v3", "/v1/models", "https://h/api/v3/models"),
    ],
)
def test_the_url_takes_the_place_of_ours(url, path, target):
    assert Upstream(url, None).target(path, "") == target


def test_a_call_that_comes_before_anything_is_written_finds_no_session(tmp_path):
    """A key of ours, of a recording elsewhere. Red, as a 500 of the recorder, when its tables are only queued."""
    with Journal(tmp_path / "run.db") as journal:
        journal.write(lambda _: time.sleep(0.2))
        assert not RecordedSessions(journal, idle_s=600.0, say=print).has(new_key())
