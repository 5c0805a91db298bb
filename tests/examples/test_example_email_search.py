"""The inbox: search and reading in SQL, the agent's and the judge's whole path by script, and two steps of training."""

import itertools
import json
import sqlite3

import pytest
from lines import different
from scripted_models import rows_of, tool_call


@pytest.fixture(scope="module")
def inbox(tmp_path_factory):
    from email_search.make_data import write_inbox

    return write_inbox(tmp_path_factory.mktemp("inbox"))


@pytest.fixture(scope="module")
def database(inbox):
    return inbox / "emails.db"


@pytest.fixture(scope="module")
def tasks(inbox):
    return [row for split in ("train", "test") for row in rows_of(inbox / f"{split}.jsonl")]


def use(database, name, **arguments):
    from email_search.inbox import use_tool

    return use_tool(database, name, json.dumps(arguments))


def test_every_question_is_answered_by_its_email(database, tasks):
    assert len(tasks) == len({task["question"] for task in tasks}) == 240
    for task in tasks:
        assert task["answer"] in use(database, "read_email", id=task["email_id"])


def test_moved_meetings_count_as_moved(database, tasks):
    moved = [task for task in tasks if "is taken, so" in use(database, "read_email", id=task["email_id"])]
    assert len(moved) == 20
    for task in moved:
        person, topic = task["question"].removeprefix("In which room do I meet ").rstrip("?").split(" about ")
        lines = use(database, "search_inbox", words=topic, sender=person.lower()).splitlines()
        assert len(lines) == 2
        newest = max(lines, key=lambda line: line.split(" | ")[1])
        assert newest.startswith(f"{task['email_id']} | ")


def test_the_same_seed_writes_the_same_inbox(inbox, tmp_path):
    from email_search.make_data import write_inbox

    def content(folder):
        with sqlite3.connect(folder / "emails.db") as connection:
            rows = connection.execute("SELECT * FROM emails").fetchall()
        connection.close()
        return rows, (folder / "train.jsonl").read_bytes()

    assert content(write_inbox(tmp_path)) == content(inbox)
    assert content(write_inbox(tmp_path, seed=1)) != content(inbox)


def test_search(database):
    lines = use(database, "search_inbox", words="invoice printing").splitlines()
    assert lines
    assert all("billing@" in line for line in lines)
    assert len(use(database, "search_inbox", words="Robin").splitlines()) == 8
    assert use(database, "search_inbox", words="invoice", sender="railway") == "none"
    assert use(database, "search_inbox", words="Robin", sender="%") == "none"
    assert use(database, "search_inbox", words='zebra" OR "Robin') == "none"
    assert use(database, "search_inbox", words="NEAR(") == "none"


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("delete_email", "{}", "there is no tool 'delete_email'; there are search_inbox, read_email"),
        ("search_inbox", "not JSON", "Invalid JSON"),
        ("search_inbox", "{}", "words: Field required"),
        ("search_inbox", '{"words": "?!"}', "at least one word"),
        ("read_email", '{"id": "first"}', "id: Input should be a valid integer"),
        ("read_email", '{"id": 1, "folder": "sent"}', "folder: Extra inputs are not permitted"),
        ("read_email", '{"id": 99999}', "there is no email 99999"),
        ("read_email", '{"id": 99999999999999999999}', "id: Input should be less than"),
    ],
)
def test_wrong_tool_calls_are_told_to_the_model(database, name, arguments, told):
    from email_search.inbox import use_tool

    result = use_tool(database, name, arguments)
    assert result.startswith("error: ")
    assert told in result


def test_the_database_is_opened_for_reading_only(database):
    from email_search import inbox

    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        inbox._query(database, "DELETE FROM emails", ())
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        inbox._query(database.with_name("absent.db"), "SELECT 1", ())


def test_search_read_answer_and_verdict(database, tasks, scripted, play):
    from email_search.agent import judge, run_agent

    task = next(task for task in tasks if "tracking number" in task["question"])
    found = task["email_id"]
    model = scripted(
        tool_call("search_inbox", '{"words": "tracking"}'),
        tool_call("read_email", json.dumps({"id": found})),
        f"It is {task['answer']}.",
    )
    arguments = {"task": task, "model": model, "workflow_args": {"database": str(database)}}
    output = play(run_agent, models=[model], **arguments)
    assert output.response == f"It is {task['answer']}."
    assert output.metrics == {"answered": True, "tool_calls": 2, "read_the_right_email": True}
    assert task["answer"] in model.seen[0]

    for verdict, reward in (("yes yes", 1.0), ("yes no", 0.8), ("no yes", 0.0)):
        correct, brief = verdict.split()
        judging = scripted(f"correct: {correct}\nbrief: {brief}")
        auxiliary = {"judge": judging}
        judged = play(judge, models=[judging], task=task, response=output.response, auxiliary_models=auxiliary)
        assert judged.reward == pytest.approx(reward)
        assert task["answer"] in judging.requests[0][0]["content"]


def test_an_agent_that_never_answers_gets_nothing_and_nobody_is_asked(database, tasks, scripted, play):
    from email_search.agent import MAX_CALLS, judge, run_agent

    model = scripted(*(tool_call("read_email", '{"id": 0}', f"call_{n}") for n in range(MAX_CALLS)))
    arguments = {"task": tasks[0], "model": model, "workflow_args": {"database": str(database)}}
    output = play(run_agent, models=[model], **arguments)
    assert output.response == ""
    assert output.metrics == {"answered": False, "tool_calls": MAX_CALLS, "read_the_right_email": False}
    judged = play(judge, models=[], task=tasks[0], response="", auxiliary_models={})
    assert judged.reward == 0.0


@pytest.mark.parametrize("line", different("examples/email_search/main.py"), ids=" ".join)
def test_two_steps_of_training(line, short, check_run):
    """The stand-in judges by the answer's length, so that there is something to learn for a model that knows nothing.

    Every fifth verdict is unreadable: those rollouts are tried again, and none of them gets a reward for it.
    """
    from email_search import main as example
    from parts.model_judge import read_case, verdict_text

    from sharpen.learning.experience.reading import read_groups

    count = itertools.count(1)

    def by_length(messages):
        given = read_case(messages[-1]["content"])["given_answer"]
        return "Hard to say." if next(count) % 5 == 0 else verdict_text({"correct": len(given) % 2 == 0, "brief": True})

    result = example.main([*line, *short], judging_rule=by_length)
    rollouts = check_run(result)
    assert {rollout.reward for rollout in rollouts} == {0.0, 1.0}
    failed = [attempt for group in read_groups(result.run_dir / "run.db") for attempt in group.attempts]
    assert failed
    for attempt in failed:
        assert (attempt.outcome, attempt.reward) == ("judge_error", None)
        assert "neither yes nor no" in attempt.error
