"""The rollout's page: calls, what they come from, tokens, text that wants to be more than text."""

import json
import shlex
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from addresses import HOSTILE, HOSTILE_ROLLOUT, PAGES
from experience_builders import make_call, make_rollout

from sharpen.learning.experience.reading import read_groups
from sharpen.show.view.data.messages import message_view, origins
from sharpen.show.view.data.rollout import time_line
from sharpen.show.view.folders import Folder


@pytest.fixture
def found(client, run, library):
    """The client, the run's address, and the recorded rollouts by name."""
    library(run).index(Folder.of(run), wait_s=120)
    groups = read_groups(run / "run.db")
    recorded = [one for group in groups for one in (*group.rollouts, *group.attempts)]
    return client(run), f"/run/{Folder.of(run).key}", {f"t{key}": one for key, one in enumerate(recorded, 1)}


def test_a_rollout_as_it_was_recorded(found):
    http, address, recorded = found
    for name, rollout in list(recorded.items())[:6]:
        page = http.get(f"{address}/rollout/{name}?format=json").json()
        assert (page["id"], page["outcome"], page["reward"]) == (rollout.id, rollout.outcome.value, rollout.reward)
        assert [call["sampled_tokens"] for call in page["calls"]] == [len(one.sampled_ids_S) for one in rollout.calls]
        second = page["calls"][1]
        assert second["origin"]["kind"] == "continues"
        # What the first call had is not said again.
        assert [message["role"] for message in second["messages"]] == ["tool"]
        assert second["messages"][0]["answers"] == "look_up"
        assert page["calls"][0]["response"]["tool_calls"][0]["name"] == "look_up"
        times = page["time_line"]
        assert times["recorded"]
        assert times["in_calls"] == pytest.approx(sum(call.seconds for call in rollout.calls))
        assert times["elsewhere"] == pytest.approx(rollout.seconds - times["in_calls"])
        starts = [call.started - rollout.started for call in rollout.calls]
        assert [span["start"] for span in times["spans"]] == pytest.approx(starts)
        assert {span["lane"] for span in times["spans"]} == {0}


def test_tokens_have_their_loss(found):
    http, address, recorded = found
    name, rollout = next((name, one) for name, one in recorded.items() if one.scored)
    mates = http.get(f"{address}/rollout/{name}?format=json").json()["mates"]
    rewards = [mate["reward"] for mate in mates if mate["kind"] == "rollout" and mate["reward"] is not None]
    advantage = rollout.reward - sum(rewards) / len(rewards)
    call = rollout.calls[1]
    tokens = http.get(f"{address}/rollout/{name}/tokens.json?call=1").json()
    assert [one["ids"] for one in tokens["tokens"]] == [[number] for number in call.sampled_ids_S.tolist()]
    assert [one["logprobs"][0] for one in tokens["tokens"]] == pytest.approx(call.logprobs_S.tolist())
    assert all(one["advantage"] == pytest.approx(advantage) for one in tokens["tokens"])
    assert all(one["weight"] == pytest.approx(1 / len(call.sampled_ids_S)) for one in tokens["tokens"])
    entropies = [one["entropies"][0] for one in tokens["tokens"]]
    assert entropies == pytest.approx((0.1 - 0.7 * call.logprobs_S).tolist(), rel=1e-3)
    logs_S = 0.1 * ((call.sampled_ids_S + 1) % 7 - 3)
    assert [one["ratios"][0] for one in tokens["tokens"]] == pytest.approx(np.exp(logs_S).tolist(), rel=1e-3)
    assert [one["clipped"] for one in tokens["tokens"]] == (logs_S > 0.25).tolist()
    assert tokens["tokens"][-1]["text"].strip() == "<end>"
    assert tokens["context_ids"] == [len(rollout.calls[0].prompt_ids_P) + len(rollout.calls[0].sampled_ids_S), 5]
    assert tokens["context"][1].split()[:3] == ["the", "shelf", "holds"]
    assert not tokens["problem"]


@pytest.mark.parametrize(
    ("lost", "has_entropies"), [("DROP TABLE entropies", False), ("ALTER TABLE entropies DROP COLUMN log_ratios", True)]
)
def test_a_run_that_did_not_record_entropies_or_ratios_shows_the_other_numbers(copied, client, lost, has_entropies):
    with closing(sqlite3.connect(copied / "run.db")) as journal:
        journal.execute(lost)
        journal.commit()
    http, address = client(copied), f"/run/{Folder.of(copied).key}/rollout/t1"
    tokens = http.get(f"{address}/tokens.json?call=0").json()["tokens"]
    assert all(bool(one["entropies"]) == has_entropies and one["weight"] > 0 for one in tokens)
    assert all(one["ratios"] == [] and not one["clipped"] for one in tokens)


def test_an_attempt_that_was_repeated_was_not_trained(found):
    """It has the id of the rollout that took its place, which may be trained."""
    http, address, recorded = found
    pages = {name: http.get(f"{address}/rollout/{name}?format=json").json() for name in recorded}
    name = next(name for name, page in pages.items() if page["kind"] == "repeated attempt")
    assert pages[name]["trained_in"] == []
    assert all(call["no_loss"] == "its rollout was not trained" for call in pages[name]["calls"])
    tokens = http.get(f"{address}/rollout/{name}/tokens.json?call=0").json()["tokens"]
    assert all(one["entropies"] == one["ratios"] == [] and one["advantage"] is None for one in tokens)


def at(index, started, seconds, agent=""):
    return make_call(index, [1], [2], started=started, seconds=seconds, agent=agent)


def test_calls_that_overlap_have_lanes_of_their_own_and_count_once():
    calls = [at(0, 101.0, 4.0), at(1, 102.0, 1.0, "scout"), at(2, 103.5, 2.5, "scout"), at(3, 108.0, 1.0)]
    times = time_line(make_rollout(calls, started=100.0, seconds=12.0))
    assert [(one.call, one.start, one.lane, times.agents[one.agent]) for one in times.spans] == [
        (0, 1.0, 0, ""),
        (1, 2.0, 1, "scout"),
        (2, 3.5, 1, "scout"),
        (3, 8.0, 0, ""),
    ]
    assert (times.lanes, times.in_calls, times.elsewhere, times.seconds) == (2, 6.0, 6.0, 12.0)


def test_calls_of_older_runs_are_placed_one_after_the_other():
    times = time_line(make_rollout([at(0, None, 1.0), at(1, None, 2.0)], seconds=5.0))
    assert [one.start for one in times.spans] == [0.0, 1.0]
    assert (times.recorded, times.elsewhere) == (False, 2.0)


def test_a_clock_that_is_behind_moves_the_beginning():
    """The workflow may run on another machine than the model."""
    times = time_line(make_rollout([at(0, 99.5, 1.0)], started=100.0, seconds=1.0))
    assert [one.start for one in times.spans] == [0.0]
    assert time_line(make_rollout([])).spans == ()


def test_a_failure_has_its_traceback(found):
    http, address, recorded = found
    name = next(name for name, one in recorded.items() if one.traceback)
    html = http.get(f"{address}/rollout/{name}").text
    assert "return await asyncio.wait_for(shop.ask(thing), 30)" in html
    assert "<summary" in html[: html.index("asyncio.wait_for")]


def test_without_a_tokenizer_tokens_are_ids(copied, client, library):
    for file in copied.glob("global_step_*/tokenizer.json"):
        file.write_text("{")
    address = f"/run/{Folder.of(copied).key}"
    tokens = client(copied).get(f"{address}/rollout/t1/tokens.json?call=0").json()
    assert tokens["tokens"][0]["text"] == f"<{tokens['tokens'][0]['ids'][0]}>"
    assert "tokenizer.json" in tokens["problem"]


def test_a_compacted_history_is_a_fork_with_its_reason(found):
    http, address, recorded = found
    name = next(name for name, one in recorded.items() if len(one.calls) == 3)
    origin = http.get(f"{address}/rollout/{name}?format=json").json()["calls"][2]["origin"]
    assert (origin["kind"], origin["depth"]) == ("start", 1)


def test_a_call_has_the_span_of_the_agents_own_traces(copied, client, library):
    with closing(sqlite3.connect(copied / "run.db")) as journal:
        journal.execute("INSERT INTO call_traces VALUES (1, 0, ?, ?)", ("a" * 32, "b" * 16))
        journal.commit()
    library(copied).index(Folder.of(copied), wait_s=120)
    address = f"/run/{Folder.of(copied).key}/rollout/t1"
    http = client(copied)
    calls = http.get(f"{address}?format=json").json()["calls"]
    assert [(call["trace"], call["span"]) for call in calls[:2]] == [("a" * 32, "b" * 16), ("", "")]
    assert http.get(address).text.count("a" * 32) == 1


def said(*texts):
    roles = ("user", "assistant")
    return tuple({"role": roles[place % 2], "content": text} for place, text in enumerate(texts))


def test_where_calls_come_from():
    first = make_call(0, [1, 2], [3], messages=said("a"), response={"role": "assistant", "content": "b"})
    goes_on = make_call(1, [1, 2, 3, 4], [5], parent=0, messages=said("a", "b", "c"))
    rendered = make_call(2, [1, 9], [5], messages=said("a", "b", "c"))
    changed = make_call(3, [1, 2, 7], [5], messages=said("a", "B", "c"))
    again = make_call(4, [1, 2], [6], messages=said("a"))
    other = make_call(5, [8], [6], messages=said("z"), agent="critic")
    found = origins([first, goes_on, rendered, changed, again, other])
    assert [(one.kind, one.of) for one in found[:2]] == [("start", None), ("continues", 0)]
    assert found[2].kind == "fork"
    assert (found[2].of, found[2].kept, found[2].kept_ids) == (1, 3, 1)
    assert "changed" in found[3].reason
    assert found[3].kept == 1
    assert "again" in found[4].reason
    assert found[5].kind == "start"
    assert "critic" in found[5].reason


def test_an_answer_that_comes_back_otherwise_written_is_not_shown_again():
    """Red where it is new because the agent gave it a name; the next question is what is new. Tokens say that it is the
    same: a call whose tokens do not continue is a fork, and shows it."""
    first = make_call(
        0, [1, 2], [3], messages=said("a"), response={"role": "assistant", "content": "b", "tool_calls": []}
    )
    messages = (*said("a"), {"role": "assistant", "content": "b", "name": "me"}, {"role": "user", "content": "c"})
    goes_on = make_call(1, [1, 2, 3, 4], [5], parent=0, messages=messages)
    other = make_call(1, [1, 2, 9], [5], messages=messages)
    assert [one.kept for one in origins([first, goes_on])] == [0, 2]
    assert [one.kept for one in origins([first, other])] == [0, 1]


def test_only_pictures_that_are_data_are_shown():
    """An address elsewhere would tell its host who reads what; an SVG picture may hold a script."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}}
        for url in ("data:image/png;base64,AAAA", "https://elsewhere.example/a.png", "data:image/svg+xml;base64,AAAA")
    ]
    view = message_view({"role": "user", "content": parts})
    assert [(part.kind, bool(part.url)) for part in view.parts] == [("image", True), ("other", False), ("other", False)]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": None, "content": {"x": 1}},
        {"role": "tool", "content": 5, "tool_calls": [None, {"function": None}, {"function": {"arguments": {"a": 1}}}]},
        {
            "role": "user",
            "content": [None, {"type": "image_url"}, {"type": "image_url", "image_url": None}, {"text": 1}],
        },
    ],
)
def test_odd_messages_are_shown(message):
    assert message_view(message).role


@pytest.mark.parametrize("page", [*PAGES[:9], "/run/{run}/rollouts?text=alert", "/run/{run}/task?id=train/4"])
def test_text_of_a_rollout_stays_text(client, run, library, page):
    library(run).index(Folder.of(run), wait_s=120)
    text = client(run).get(page.format(run=Folder.of(run).key)).text
    for part in ("<script>alert", "<img src=x", "<svg onload", "\x1b", "\u202e", "\u2066", "49 javascript"):
        assert part not in text


def test_the_hostile_rollout_is_shown_whole(found):
    http, address, recorded = found
    name = next(name for name, one in recorded.items() if one.id == HOSTILE_ROLLOUT)
    html = http.get(f"{address}/rollout/{name}").text
    assert "&lt;script&gt;alert(1)" in html
    page = http.get(f"{address}/rollout/{name}?format=json").json()
    text = page["calls"][1]["response"]["parts"][0]["text"]
    assert text.startswith("<script>alert(1)</script>")
    assert "\\x1b[31mred" in text
    assert "\\u202e" in text


def test_the_command_of_a_call_is_one_word_for_the_shell(found):
    """Nothing of a rollout's text runs in the shell that it is pasted into."""
    http, address, recorded = found
    name = next(name for name, one in recorded.items() if one.id == HOSTILE_ROLLOUT)
    call = http.get(f"{address}/rollout/{name}?format=json").json()["calls"][0]
    words = shlex.split(call["curl"])
    body = json.loads(words[words.index("-d") + 1])
    assert body["messages"][1]["name"] == HOSTILE
    assert len(words) == 8
    assert call["curl"].isascii()


def test_ids_lead_to_their_rollout(found):
    http, address, recorded = found
    response = http.get(f"{address}/find?id={HOSTILE_ROLLOUT}")
    assert response.status_code == 303
    assert recorded[response.headers["location"].rsplit("/", 1)[1]].id == HOSTILE_ROLLOUT
    assert http.get(f"{address}/find?id=none").status_code == 404


@pytest.mark.parametrize("name", ["t0", "t99999", "x1", "t1.5", "t-1", "e99999", "t999999999999999999999"])
def test_a_rollout_that_is_not_there(found, name):
    http, address, _ = found
    assert http.get(f"{address}/rollout/{name}").status_code == 404
