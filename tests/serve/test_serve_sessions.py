"""Sessions of a server that learns, over a scripted engine: what is kept, given, lost and refused."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted import ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen.agent.rollout.refill import StepRollouts
from sharpen.gateway.exchange import RawRequest
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.requests import ApiError
from sharpen.placement.exchange.batch import SESSIONS, ExploredBatch
from sharpen.placement.exchange.store import Batches, FolderStore
from sharpen.serve.front import Front
from sharpen.serve.sessions import FORGOTTEN_S, Sessions
from sharpen.serve.visit import MAX_TOKENS, Visit
from sharpen.types import Task

KEY = "the key"
ASK = json.dumps({"messages": [{"role": "user", "content": "hi"}], "model": "toy"}).encode()


@dataclass
class Server:
    """The sessions of a server, and the front before them."""

    sessions: Sessions
    front: Front
    engine: ScriptedEngine
    loop: ServingLoop
    store: Batches

    def call(self, key: str) -> str:
        """The id of the answer."""
        raw = RawRequest(method="POST", path="/v1/chat/completions", key=key, retry=0, body=ASK)

        async def answered() -> bytes:
            reply = await self.front.start(raw)
            reply.delivered()
            assert reply.status == 200, reply.body
            return reply.body

        return str(json.loads(self.loop.run(answered()))["id"])

    def say(self, path: str, **body) -> dict:
        raw = RawRequest(method="POST", path=path, key=KEY, retry=0, body=json.dumps(body).encode())
        return self.sessions.open(raw) if path == "/sessions" else self.sessions.rate(raw)

    def talk(self, reward: float | None = None, task: str = "t") -> str:
        """The id of a session with a call."""
        session = self.say("/sessions", task_id=task)
        self.call(session["api_key"])
        if reward is not None:
            self.say("/feedback", session=session["id"], reward=reward)
        return session["id"]

    def metric(self, name: str) -> float:
        return next(one.values[()] for one in self.sessions.metrics() if one.name == f"sessions_{name}")

    def settle(self, trained: int) -> dict[int, int]:
        return self.sessions.settle(trained, self.store, self.store.numbers())

    def put(self, number: int, ids: list[str]) -> None:
        rollouts = StepRollouts(groups=(), batch_size=1, usable=1, refill_rounds=0, seconds=0.0, refill_s=0.0)
        batch = ExploredBatch(rollouts=rollouts, session="", version=0, order={SESSIONS: ids}, generate_s=0.0)
        self.store.put(number, batch.to_bytes())


@contextmanager
def serving(folder: Path, *, idle_s: float = 600.0, group_size: int = 1, trained: int = 0) -> Iterator[Server]:
    loop, tokenizer = ServingLoop(), toy_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda request: "an answer")
    gateway = Gateway(engine, tokenizer, model_name="toy", loop=loop.loop)
    sessions = Sessions(gateway, KEY, folder / "sessions", idle_s=idle_s, group_size=group_size)
    store = Batches(FolderStore(folder))
    sessions.restore(store, trained)
    yield Server(sessions, Front(gateway, sessions, KEY, {}), engine, loop, store)
    loop.run(gateway.close())
    loop.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


def visits(server: Server) -> dict[str, Visit]:
    return server.sessions._visits


def test_an_ended_session_leaves_its_calls_to_its_file(server):
    id_ = server.talk()
    open_ = server.talk(None, task="open")
    server.say("/feedback", session=id_, end=True)
    server.sessions.save()
    ended = visits(server)[id_]
    assert (ended.filed, ended.before, ended.session) == (True, (), None)
    assert visits(server)[open_].session is not None
    server.say("/feedback", session=id_, reward=0.5)  # long after
    server.sessions.save()
    (waiting,) = server.sessions.rated()
    assert (waiting.id, waiting.reward, waiting.before) == (id_, 0.5, ())
    (call,) = server.sessions.with_calls(waiting).before
    assert call.trainable


def test_a_call_is_named_also_if_its_session_ended_right_after_it(server):
    session = server.say("/sessions")
    name = server.call(session["api_key"])
    visit = visits(server)[session["id"]]
    visit.names.clear()
    visit.finish()
    assert list(visit.names.values()) == [0]
    assert server.say("/feedback", call=name, reward=1)["reward"] == 1


def test_a_session_that_is_rated_during_a_call_is_saved_with_its_reward(server):
    session = server.say("/sessions")
    server.engine.hold()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.call, session["api_key"])
        assert server.engine.waiting.acquire(timeout=30)
        server.say("/feedback", session=session["id"], reward=1)
        server.sessions.save()
        server.loop.call(server.engine.release)
        with pytest.raises(CancelledError):  # a 401 over HTTP
            running.result()
    assert visits(server)[session["id"]].running == 0
    (file,) = (server.sessions._folder).iterdir()
    assert Visit.from_bytes(file.read_bytes()).reward == 1


def test_what_could_not_be_written_is_written_the_next_time(server, tmp_path):
    id_ = server.talk()
    server.sessions.save()
    server.say("/feedback", session=id_, reward=0.5)
    file = tmp_path / "sessions" / f"{id_}.session"
    before = file.read_bytes()
    file.unlink()
    file.mkdir()  # nothing can be moved to its place
    with pytest.raises(OSError, match=id_):
        server.sessions.save()
    assert server.sessions.rated() == []
    file.rmdir()
    file.write_bytes(before)
    server.sessions.save()
    assert [one.id for one in server.sessions.rated()] == [id_]
    with serving(tmp_path) as again:
        assert again.metric("rated") == 1
        assert len(Visit.from_bytes(file.read_bytes()).before) == 1


def test_requests_need_not_wait_for_what_is_packed_and_what_they_change_is_written_the_next_time(server):
    """Red when `save` packs files under the lock that `enter` and `rate` take."""

    class Watched(Visit):
        def to_bytes(self) -> bytes:
            waiting.append(server.sessions._lock.locked())
            if rewards and not waiting[-1]:
                server.say("/feedback", session=self.id, reward=rewards.pop(), end=True)
            return super().to_bytes()

    waiting, rewards = [], [0.25, 0.75]
    visit = Watched.new(Task(id="t", index=0, row={}), 0)
    server.sessions._visits[visit.id] = server.sessions._by_key[visit.key] = visit
    server.call(visit.key)
    for reward in (None, 0.75, 0.25):  # of the file: the first is open, the others have ended
        server.sessions.save()
        written = Visit.from_bytes(server.sessions._file(visit).read_bytes())
        assert (written.reward, len(written.before), len(written.names)) == (reward, 1, 1)
        assert visit.changed == bool(reward != 0.25)
    assert waiting == [False, False, False]
    assert [one.id for one in server.sessions.rated()] == [visit.id]


def test_the_shared_session_of_the_servers_key_is_bounded(server):
    server.call(KEY)
    (first,) = visits(server).values()
    first.session._counts["prompt_tokens"] = MAX_TOKENS
    server.call(KEY)
    assert first.ended
    assert len(visits(server)) == 2
    session = server.say("/sessions")
    server.call(session["api_key"])
    visits(server)[session["id"]].session._counts["sampled_tokens"] = MAX_TOKENS
    with pytest.raises(AssertionError, match="session_full"):
        server.call(session["api_key"])


def test_what_nobody_rates_is_forgotten_after_a_week_and_counted(server):
    id_ = server.talk()
    server.say("/feedback", session=id_, end=True)
    rated = server.talk(1.0)
    for visit in visits(server).values():
        visit.used = time.time() - FORGOTTEN_S - 1
    server.sessions.save()
    assert [*visits(server)] == [rated]
    assert server.metric("forgotten_total") == 1


def test_an_unknown_field_that_is_null_is_as_none(server):
    id_ = server.say("/sessions", task_id="t", labels=None)["id"]
    server.say("/feedback", session=id_, reward=0.5, comment=None)
    assert visits(server)[id_].reward == 0.5
    with pytest.raises(ApiError, match="comment: Extra inputs are not permitted"):
        server.say("/feedback", session=id_, reward=0.5, comment="good", other=None)


def test_feedback_on_what_is_in_a_batch_comes_too_late(server):
    id_ = server.talk(1.0)
    server.sessions.save()
    assert server.sessions.give([id_], 1)
    with pytest.raises(ApiError) as caught:
        server.say("/feedback", session=id_, reward=0.0)
    assert (caught.value.status, "batch 1" in str(caught.value)) == (409, True)
    assert server.sessions.rated() == []
    server.put(1, [id_])
    assert server.settle(1) == {}
    with pytest.raises(ApiError) as caught:
        server.say("/feedback", session=id_, reward=0.0)
    assert caught.value.status == 404
    assert list(server.sessions._folder.iterdir()) == []


def test_a_session_that_was_just_rated_anew_goes_into_no_batch_yet(server):
    id_ = server.talk(1.0)
    server.sessions.save()
    (chosen,) = server.sessions.rated()
    server.say("/feedback", session=id_, reward=0.0)
    assert not server.sessions.give([chosen.id], 1)
    assert visits(server)[id_].batch is None


def test_the_sessions_of_a_refused_batch_wait_again(server):
    ids = [server.talk(1.0), server.talk(0.0)]
    server.sessions.save()
    server.sessions.give(ids, 1)
    server.put(1, ids)
    assert server.settle(0) == {}
    server.store.remove(1)
    assert server.settle(0) == {1: 2}
    server.sessions.save()
    assert [one.id for one in server.sessions.rated()] == ids


def test_the_sessions_of_a_refused_batch_wait_again_if_another_servers_trains_in_its_place(server):
    """Red when a session is forgotten once a batch of its number has trained: it was lost."""
    lost, kept = server.talk(1.0), server.talk(0.0)
    server.sessions.save()
    server.sessions.give([lost], 1)
    server.sessions.give([kept], 2)
    server.put(1, ["another server's"])
    server.put(2, [kept])
    assert server.settle(0) == {}
    assert server.settle(2) == {1: 1}
    server.sessions.save()
    assert [one.id for one in server.sessions.rated()] == [lost]
    assert {*visits(server)} == {lost}


def test_sessions_wait_again_if_another_server_was_faster(server):
    id_ = server.talk(1.0)
    server.sessions.save()
    server.sessions.give([id_], 1)
    server.sessions.take_back([id_])
    assert server.sessions.rated() == [], "its file does not say so yet"
    server.sessions.save()
    assert [one.id for one in server.sessions.rated()] == [id_]


@pytest.mark.parametrize("when", ["before the batch was there", "after", "with another one there", "as older files"])
def test_after_a_kill_a_session_is_in_a_batch_or_waits(when, tmp_path):
    with serving(tmp_path) as before:
        ids = [before.talk(1.0), before.talk(0.0)]
        before.sessions.save()
        if when != "as older files":
            before.sessions.give(ids[:1], 1)
        if when in ("after", "as older files"):
            before.put(1, ids[:1])
        if when == "with another one there":
            before.put(1, ["another"])
    with serving(tmp_path) as after:
        given = ids[:1] if when in ("after", "as older files") else []
        assert [one.id for one in visits(after).values() if one.batch == 1] == given
        assert {one.id for one in after.sessions.rated()} == {*ids} - {*given}
        after.settle(1)
        assert {*visits(after)} == {*ids} - {*given}
    with serving(tmp_path) as again:
        assert {*visits(again)} == {*ids} - {*given}


@pytest.mark.parametrize("trained", [1, 0])
def test_what_was_trained_and_then_deleted_is_not_trained_again_after_a_restart(trained, tmp_path):
    """Red before: the sessions of a deleted batch waited again, also if it had trained."""
    with serving(tmp_path) as before:
        given, later = before.talk(1.0), before.talk(0.0)
        before.sessions.save()
        before.sessions.give([given], 1)
        before.sessions.give([later], 2)
        before.put(1, [given])
        before.put(2, [later])
    for number in (1, 2):
        before.store.remove(number)
    with serving(tmp_path, trained=trained) as after:
        waiting = {later} if trained else {given, later}
        assert {one.id for one in after.sessions.rated()} == waiting
        assert after.settle(trained) == {}
        assert {*visits(after)} == waiting
