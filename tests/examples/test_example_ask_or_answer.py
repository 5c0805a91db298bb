"""Asking back: reading replies, the talk with a simulated user by script, the judge's sums, two steps of training."""

import pytest
from lines import different
from scripted_models import rows_of

TASK = {
    "book": ["Sam Berg: 1111", "Kim Ito: 3333", "Sam Hill: 2222"],
    "request": "What is the extension of Sam?",
    "meant": "Sam Hill",
    "answer": "2222",
    "ambiguous": True,
}


@pytest.mark.parametrize(
    ("said", "question", "answer"),
    [
        ("ASK: Which Sam?", "Which Sam?", None),
        (" ask:\nWhich Sam? ", "Which Sam?", None),
        ("ANSWER: 2222", None, "2222"),
        ("2222", None, "2222"),
        ("I must ASK: which?", None, "I must ASK: which?"),
        ("ASK:", "", None),
        ("", None, ""),
    ],
)
def test_replies_are_read(said, question, answer):
    from ask_or_answer.agent import read_answer, read_question

    assert read_question(said) == question
    if answer is not None:
        assert read_answer(said) == answer


def test_question_users_reply_answer_and_verdict(scripted, play):
    from ask_or_answer.agent import judge, run_agent

    model, user = scripted("ASK: Which Sam?", "ANSWER: 2222"), scripted("<think>Hill</think>Sam Hill, please.")
    output = play(run_agent, models=[model, user], task=TASK, model=model, auxiliary_models={"user": user})
    assert output.response == {"answer": "2222", "questions": ["Which Sam?"]}
    assert model.seen == ["Sam Hill, please."]
    (told,) = user.requests[0]
    assert '"question": "Which Sam?"' in told["content"]
    assert "Sam Hill" in told["content"]
    assert "2222" not in told["content"], "the user does not know the address book"

    judging = scripted("correct: yes")
    auxiliary = {"judge": judging}
    judged = play(judge, models=[judging], task=TASK, response=output.response, auxiliary_models=auxiliary)
    assert judged.reward == 1.0
    assert judged.metrics == {"correct": 1.0, "needless_questions": 0, "asked_when_ambiguous": 1.0}


@pytest.mark.parametrize(
    ("ambiguous", "num_questions", "correct", "reward"),
    [
        (True, 1, "yes", 1.0),
        (True, 2, "yes", 0.7),
        (True, 0, "no", 0.0),
        (False, 0, "yes", 1.0),
        (False, 1, "yes", 0.7),
        (False, 1, "no", -0.3),
    ],
)
def test_needless_questions_cost(scripted, play, ambiguous, num_questions, correct, reward):
    from ask_or_answer.agent import judge

    judging = scripted(f"correct: {correct}")
    response = {"answer": "2222", "questions": ["Which?"] * num_questions}
    task = {**TASK, "ambiguous": ambiguous}
    judged = play(judge, models=[judging], task=task, response=response, auxiliary_models={"judge": judging})
    assert judged.reward == pytest.approx(reward)


def test_an_agent_that_only_asks_is_stopped(scripted, play):
    from ask_or_answer.agent import judge, run_agent

    model, user = scripted(*["ASK: Which Sam?"] * 3), scripted("Sam Hill.", "Sam Hill!")
    output = play(run_agent, models=[model, user], task=TASK, model=model, auxiliary_models={"user": user})
    assert output.response == {"answer": "", "questions": ["Which Sam?"] * 3}
    judged = play(judge, models=[], task=TASK, response=output.response, auxiliary_models={})
    assert judged.reward == pytest.approx(-0.6)


def test_requests_are_what_they_claim(tmp_path):
    from ask_or_answer.make_data import write_requests

    folder = write_requests(tmp_path)
    rows = rows_of(folder / "train.jsonl")
    assert sum(row["ambiguous"] for row in rows) == len(rows) / 2
    for row in rows:
        asked = row["request"].removeprefix("What is the extension of ").rstrip("?")
        fitting = [entry for entry in row["book"] if entry.startswith(asked)]
        assert len(fitting) == (2 if row["ambiguous"] else 1)
        assert f"{row['meant']}: {row['answer']}" in fitting


def test_the_stand_in_plays_user_and_judge():
    from ask_or_answer.agent import RUBRIC, user_prompt
    from ask_or_answer.main import rule
    from parts.model_judge import judge_prompt

    assert rule([{"content": user_prompt(TASK, "Which?")}]) == "I mean Sam Hill."
    case = {"request": "", "true_answer": "2222", "given_answer": "It is 2222."}
    assert rule([{"content": judge_prompt(RUBRIC, case)}]) == "correct: yes"


@pytest.mark.parametrize("line", different("examples/ask_or_answer/main.py"), ids=" ".join)
def test_two_steps_of_training(line, short, check_run):
    """As in the inbox's test: a rule by length, so that there is something to learn for a model that knows nothing."""
    from ask_or_answer import main as example
    from parts.model_judge import read_case, verdict_text

    def by_length(messages):
        return verdict_text({"correct": len(read_case(messages[-1]["content"])["given_answer"]) % 2 == 0})

    rollouts = check_run(example.main([*line, *short], judging_rule=by_length))
    assert {rollout.reward for rollout in rollouts} == {0.0, 1.0}
