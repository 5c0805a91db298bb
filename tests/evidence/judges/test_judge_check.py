"""A judge against its owner's marks: the numbers by hand, the file, the floor, the commands."""

import io
import json
import math
import os
import pty
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_endpoint import serving
from reported_runs import make_run

from sharpen.cli import judge as command
from sharpen.cli.main import build_parser, main
from sharpen.config.functions import import_function
from sharpen.config.public import DatasetConfig, TunerModelConfig
from sharpen.config.run import AuxiliaryModelConfig, JudgeFloorConfig, RunConfig
from sharpen.errors import ConfigError, DatasetError, JudgeError
from sharpen.evidence.judges.agreement import Agreement, agreement_of, corrected_rate
from sharpen.evidence.judges.asking import Judged, ask_judge
from sharpen.evidence.judges.marks import Answer, Mark, add_mark, answers_to_mark, read_marks
from sharpen.run.judging import check_floor

JUDGES = """
from sharpen import Criterion, JudgeModel, RubricJudge

async def says_yes(task, response):
    '''Good is what says yes.'''
    return float("yes" in response)

async def never(task, response):
    raise RuntimeError("no idea")

grader = RubricJudge(
    model=JudgeModel(name="grader"), criteria=[Criterion(name="good", description="", best=1)], reason=False
)
"""


def mark(text: str, good: bool) -> Mark:
    return Mark(answer=Answer(task={"question": "q"}, text=text), good=good)


def judged(counts: tuple[int, int, int, int]) -> list[Judged]:
    """Hits, false alarms, misses, rejections."""
    kinds = ((1.0, True), (1.0, False), (0.0, True), (0.0, False))
    return [
        Judged(mark=mark("x", good), rewards=(reward,))
        for count, (reward, good) in zip(counts, kinds, strict=True)
        for _ in range(count)
    ]


def test_the_numbers_of_a_table():
    """Cohen's own kind of example, by hand: 20, 5, 10, 15 of 50: agreement 0.7, by chance 0.6 * 0.5 + 0.4 * 0.5 = 0.5,
    kappa 0.4; of 30 good ones 20 called good, of 20 others 5. Wilson's interval of 35 in 50: 0.5625 to 0.8090."""
    found = agreement_of(judged((20, 5, 10, 15)))
    assert found.agreement.value == pytest.approx(0.7)
    assert found.agreement.interval == pytest.approx((0.5625, 0.8090), abs=1e-4)
    assert found.kappa == pytest.approx(0.4)
    assert (found.true_positives.value, found.false_positives.value) == pytest.approx((2 / 3, 0.25))
    lines = "\n".join(found.lines())
    assert "50 marked answers, 50 judged: 30 good, 20 not" in lines
    assert "Cohen's kappa        0.400" in lines


def test_a_judge_that_says_yes_to_all_agrees_and_has_no_kappa_above_chance():
    found = agreement_of(judged((45, 5, 0, 0)))
    assert found.agreement.value == 0.9
    assert found.kappa == pytest.approx(0.0)
    assert "kappa        0.000" in "\n".join(found.lines())
    assert math.isnan(agreement_of(judged((5, 0, 0, 0))).kappa)
    assert math.isnan(agreement_of([]).kappa)


def test_scatter_is_how_many_turn_when_asked_again():
    found = agreement_of(
        [
            Judged(mark=mark("a", True), rewards=(1.0, 0.0)),  # deviation 0.5
            Judged(mark=mark("b", True), rewards=(0.75, 0.75)),
            Judged(mark=mark("c", False), error="E: x"),
        ]
    )
    assert found.turned is not None
    assert (found.turned.count, found.turned.of, found.deviation) == (1, 2, 0.25)
    assert (found.judged, found.failed, found.errors) == (2, 1, ("E: x",))


def test_a_success_rate_is_corrected_for_both_errors():
    """By hand: tpr 0.9, fpr 0.2, 0.55 called good: (0.55 - 0.2) / 0.7 = 0.5."""
    table = Agreement(hits=90, false_alarms=20, misses=10, rejections=80)
    found = corrected_rate([True] * 55 + [False] * 45, table)
    assert (found.measured, found.corrected) == pytest.approx((0.55, 0.5))
    assert found.low < 0.5 < found.high
    assert 0.1 < found.high - found.low < 0.4
    assert corrected_rate([True] * 55 + [False] * 45, table) == found
    cut = corrected_rate([False] * 50, table)
    assert cut.corrected == 0.0
    chance = corrected_rate([True, False], Agreement(hits=5, false_alarms=5, misses=5, rejections=5))
    assert math.isnan(chance.corrected)
    assert "cannot be corrected" in str(chance)


@given(true_rate=st.integers(0, 20), hits=st.integers(11, 20), alarms=st.integers(0, 9))
def test_the_correction_undoes_a_judge_whose_errors_are_known(true_rate, hits, alarms):
    """Of 400 answers, exactly as many called good as tpr and fpr say."""
    good = 20 * true_rate
    called = good * hits // 20 + (400 - good) * alarms // 20
    table = Agreement(hits=hits, misses=20 - hits, false_alarms=alarms, rejections=20 - alarms)
    found = corrected_rate([True] * called + [False] * (400 - called), table)
    assert found.corrected == pytest.approx(true_rate / 20, abs=1e-9)


def test_a_judge_is_asked_for_each_answer_and_its_failures_are_kept_apart():
    asked = []

    async def judge(task, response):
        asked.append((dict(task), response))
        task["question"] = "changed"
        if response == "b":
            raise ValueError("no")
        return 1.0

    found = ask_judge(judge, [mark("a", True), mark("b", False)], times=2)
    assert [one.rewards for one in found] == [(1.0, 1.0), ()]
    assert found[1].error == "ValueError: no"
    assert asked.count(({"question": "q"}, "a")) == 2

    async def needy(task, response, auxiliary_models):
        return 1.0

    with pytest.raises(ConfigError, match="takes auxiliary_models"):
        ask_judge(needy, [mark("a", True)])


def test_marks_are_written_and_read(tmp_path):
    path = tmp_path / "marks.jsonl"
    for one in (mark("yes\nno", True), mark("ä", False)):
        add_mark(path, one)
    assert read_marks(path) == [mark("yes\nno", True), mark("ä", False)]
    path.write_text('{"task": {}, "answer": "a", "mark": "good"}\n\n{"task": {}, "answer": "a", "mark": 0}\n')
    assert [one.good for one in read_marks(path)] == [True, False]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"task": {}, "answer"', "line 1 is no JSON"),
        ('{"task": {}, "answer": "a", "mark": 2}', "line 1: mark is 2: it must be true or false"),
        ('{"task": {}, "answer": "a"}', "mark is None"),
        ('{"task": {}, "answer": "a", "mark": [1]}', r"mark is \[1\]"),
        ('{"answer": "a", "mark": 1}', "line 1 is no mark"),
        ("[]", "line 1 is no mark"),
        ("", "has no marks"),
    ],
)
def test_what_is_no_mark_is_said_with_its_line(tmp_path, line, said):
    (tmp_path / "m.jsonl").write_text(line)
    with pytest.raises(DatasetError, match=said):
        read_marks(tmp_path / "m.jsonl")


@pytest.fixture
def run(tmp_path):
    """A run with three tasks, each answered before and after by a text of its own."""
    return make_run(tmp_path, {f"test/{n}": ((f"no {n}", 0.0), (f"yes {n}", 1.0)) for n in range(3)})


def label(run, marks, keys):
    arguments = build_parser().parse_args(["judge", "label", str(run), "--marks", str(marks)])
    return command.run_judge(arguments, keys)


def test_answers_are_marked_by_keys_and_the_next_time_goes_on(run, tmp_path, capsys):
    marks = tmp_path / "marks.jsonl"
    assert label(run, marks, io.StringIO("y\nn\nx\ns\nq\n")) == 0
    first = read_marks(marks)
    assert [one.good for one in first] == [True, False]
    out = capsys.readouterr()
    assert "'x' means nothing here" in out.err
    assert "reward" not in out.out.replace("rewards are not shown", "")
    label(run, marks, io.StringIO("y\n" * 20))
    texts = [one.answer.text for one in read_marks(marks)]
    assert len(texts) == len(set(texts)) == 6
    assert all(one.answer.rollout for one in read_marks(marks))


def test_an_interrupt_loses_no_mark(run, tmp_path):
    class Interrupted(io.StringIO):
        def readline(self, *_):
            line = super().readline()
            if not line:
                raise KeyboardInterrupt
            return line

    with pytest.raises(KeyboardInterrupt):
        label(run, tmp_path / "m.jsonl", Interrupted("y\ny\n"))
    assert len(read_marks(tmp_path / "m.jsonl")) == 2


def test_at_a_terminal_a_key_needs_no_enter():
    """Red where a line is read: the test would wait for ever (its time limit is the pytest one)."""
    ours, theirs = pty.openpty()
    os.write(ours, b"n")
    time.sleep(0.1)  # typed ahead
    with os.fdopen(theirs, "r") as keys:
        assert command._key(keys) == "n"
    os.close(ours)


def test_a_run_without_answers_says_so(tmp_path, capsys):
    run = make_run(tmp_path, {"test/0": (("", 0.0), ("", 1.0))})
    with pytest.raises(ConfigError, match="no answers to mark"):
        answers_to_mark(run, [], 5)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Marks of 40 answers, of which `says_yes` sees 36 as their owner does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges_to_check.py").write_text(JUDGES)
    for number in range(40):
        good = number < 20
        yes = good if number % 10 else not good
        add_mark(tmp_path / "marks.jsonl", mark(f"{'yes' if yes else 'no'} {number}", good))
    return tmp_path


def test_check_prints_the_numbers_and_corrects_a_run(folder, run, capsys):
    """By hand: tpr 0.9, fpr 0.1; 0 of 3 good before, 3 of 3 after."""
    words = ["judge", "check", "marks.jsonl", "--judge", "judges_to_check.py:says_yes", "--run", str(run)]
    assert main([*words, "--times", "2"]) == 0
    out = capsys.readouterr().out
    assert "agreement            0.900 [0.769, 0.960] (36 of 40)" in out
    assert "Cohen's kappa        0.800" in out
    assert "turned when asked again  0.000" in out
    assert "they disagree on 4:" in out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["true_positive_rate"]["value"] == pytest.approx(0.9)
    rates = {place: (one["measured"], one["corrected"]) for place, one in found["corrected"].items()}
    assert set(rates.values()) == {(0.0, 0.0), (1.0, 1.0)}
    assert len(found["disagreements"]) == 4


def test_check_fails_where_the_judge_does(folder, capsys):
    assert main(["judge", "check", "--judge", "judges_to_check.py:never"]) == 1
    assert "the judge failed on 40: RuntimeError: no idea" in capsys.readouterr().out


def config(folder, **changes) -> RunConfig:
    return RunConfig(
        train_dataset=DatasetConfig(path="none"),
        model=TunerModelConfig(model_path="none", max_model_len=64),
        judge_floor=JudgeFloorConfig(marks=str(folder / "marks.jsonl"), **changes.pop("floor", {})),
        **changes,
    )


async def says_yes(task, response):
    return float("yes" in response)


async def says_anything(task, response):
    return float(sum(map(ord, response)) % 2)


async def never(task, response):
    raise RuntimeError("no idea")


def test_a_floor_refuses_a_judge_that_agrees_too_little(folder):
    said = []
    check_floor(config(folder), says_yes, said.append)
    assert said == ["judge: agrees with its owner on 0.900 [0.769, 0.960] (36 of 40), Cohen's kappa 0.800"]
    with pytest.raises(JudgeError, match=r"kappa 0.800, below the floor of 0.9: nothing was trained"):
        check_floor(config(folder, floor={"kappa": 0.9}), says_yes, said.append)
    with pytest.raises(JudgeError, match=r"below the floor of 0\.6"):
        check_floor(config(folder), says_anything, said.append)
    with pytest.raises(JudgeError, match=r"failed on 40 of 40 marked answers \(RuntimeError: no idea\)"):
        check_floor(config(folder), never, said.append)
    with pytest.raises(ConfigError, match="there is no judge"):
        check_floor(config(folder), None, said.append)
    (folder / "marks.jsonl").write_text('{"task": {}, "answer": "yes", "mark": 1}\n')
    with pytest.raises(JudgeError, match="1 marks of one kind"):
        check_floor(config(folder), says_yes, said.append)
    check_floor(config(folder).model_copy(update={"judge_floor": None}), never, said.append)


def test_the_auxiliary_models_of_a_run_are_opened_for_it(folder):
    """Through the run's own clients to a real endpoint: it calls good what its owner calls good."""
    judge = import_function("judges_to_check.py:grader")
    good = {one.answer.text for one in read_marks(folder / "marks.jsonl") if one.good}
    with serving() as endpoint:
        endpoint.answer = lambda body: json.dumps(
            {"good": int(json.loads(body["messages"][-1]["content"])["answer"] in good)}
        )
        auxiliary = {"grader": AuxiliaryModelConfig(model_path="m", max_model_len=64, base_url=endpoint.url)}
        said = []
        check_floor(config(folder, auxiliary_models=auxiliary), judge, said.append)
        assert len(endpoint.bodies) == 40
    assert said == ["judge: agrees with its owner on 1.000 [0.912, 1.000] (40 of 40), Cohen's kappa 1.000"]


def test_tune_starts_nothing_below_the_floor(folder, toy_model_dir):
    """Before a model is loaded or a directory is made."""
    from sharpen import tune

    async def workflow(task, model):
        return SimpleNamespace(response="yes")

    (folder / "tasks.jsonl").write_text('{"question": "q"}\n' * 4)
    with pytest.raises(JudgeError, match="below the floor"):
        tune(
            workflow,
            judge_func=says_anything,
            train_dataset=DatasetConfig(path=str(folder / "tasks.jsonl")),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
            judge_floor=JudgeFloorConfig(marks=str(folder / "marks.jsonl")),
        )
    assert not (folder / "checkpoints").exists()


def test_a_model_that_is_served_here_keeps_to_the_schema(folder, toy_model_dir):
    """A model of random weights says nothing of worth, and a verdict each time: it is below the floor, and never
    failed."""
    judge = import_function("judges_to_check.py:grader")
    auxiliary = {"grader": AuxiliaryModelConfig(model_path=str(toy_model_dir), max_model_len=512, max_tokens=32)}
    said = []
    with pytest.raises(JudgeError, match="below the floor"):
        check_floor(config(folder, auxiliary_models=auxiliary), judge, said.append)
    assert "of 40)" in said[0]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_mark_after_a_line_by_hand_is_a_line_of_its_own(end, tmp_path):
    """Red when it is only appended: an editor that ends no line would make one of two marks, and neither could be
    read."""
    file = tmp_path / "marks.jsonl"
    file.write_text('{"task": {"question": "q"}, "answer": "a", "mark": true}' + end)
    add_mark(file, Mark(answer=Answer(task={"question": "q"}, text="b"), good=False))
    add_mark(file, Mark(answer=Answer(task={"question": "q"}, text="c"), good=True))
    assert [(mark.answer.text, mark.good) for mark in read_marks(file)] == [("a", True), ("b", False), ("c", True)]
    assert file.read_text().count("\n") == 3
