"""`sharpen rescore`: another judge over stored rollouts, and what it would have changed."""

import json

import pytest
from reported_runs import answered, make_run

from sharpen.cli.main import main
from sharpen.evidence.rescore.changes import changes
from sharpen.evidence.rescore.scores import Score
from sharpen.learning.experience.journal import Journal
from sharpen.types import Group, Task

JUDGE = """
async def long(task, response):
    '''A longer answer is better.'''
    return float(len(response) > 3)

async def shaky(task, response):
    assert "question" in task
    if response == "broken":
        raise RuntimeError("no idea")
    return 1.0

async def never(task, response):
    return float("nan")

async def needy(task, response, auxiliary_models):
    return 1.0
"""


def score(group, old, new):
    return Score(rollout=f"{group}/{old}", group=group, task="t", old=old, new=new)


def test_what_would_have_changed():
    """By hand: `a` turns round (both rollouts change side), `b` becomes flat, `c` had no spread and gets some."""
    found = changes(
        [
            *(score("a", 0.0, 1.0), score("a", 1.0, 0.0)),
            *(score("b", 0.0, 1.0), score("b", 1.0, 1.0)),
            *(score("c", 1.0, 1.0), score("c", 1.0, 0.25)),
            score("d", 1.0, None),
        ]
    )
    assert (found.rollouts, found.failed, found.same, found.groups) == (7, 1, 2, 3)
    assert (found.flat_before, found.flat_after, found.turned) == (1, 1, 2)
    assert (found.mean_before, found.mean_after) == pytest.approx((4 / 6, 4.25 / 6))
    assert [one.new for one in found.most] == [1.0, 0.0, 1.0, 0.25]
    nothing = changes([])
    assert (nothing.rollouts, nothing.mean_before) == (0, None)


@pytest.fixture
def run(tmp_path):
    """A run whose answers after are longer and recorded as worse; two groups of training."""
    (tmp_path / "other.py").write_text(JUDGE)
    run = make_run(tmp_path, {f"test/{n}": (("abc", 1.0), ("abcdef", 0.0)) for n in range(12)})
    journal = Journal(run / "run.db")
    for number, texts in enumerate((("abc", "abcdef"), ("broken", "abcdef"))):
        task = Task(id=f"train/{number}", index=number, row={"question": "q", "tags": ["a"]})
        group_id = f"step-0/train/{number}"
        rollouts = [answered(group_id, task, text, float(text == "abc")).rollouts[0] for text in texts]
        journal.add(Group(id=group_id, task=task, version=0, rollouts=tuple(rollouts)))
    journal.close()
    return run


def test_training_and_evaluations_are_judged_anew(run, tmp_path, capsys):
    output = tmp_path / "new.jsonl"
    words = ["rescore", str(run), "--judge", f"{tmp_path / 'other.py'}:long"]
    assert main([*words, "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "4 rollouts in 2 groups" in out
    assert "mean reward 0.250 -> 0.750" in out
    assert "pushed the other way: 2" in out
    assert "held-out/sampled, after - before: -1.000 [" in out
    assert "+1.000 [" in out
    assert "(12 tasks)" in out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 4 + 24
    assert rows[0] | {"rollout": ""} == rows[0] | {"rollout": "", "old": 1.0, "new": 0.0, "task": "train/0"}
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["evaluations"]["held-out/sampled"]["new"]["difference"] == 1.0


def test_a_judge_that_fails(run, tmp_path, capsys):
    assert main(["rescore", str(run), "--judge", f"{tmp_path / 'other.py'}:shaky"]) == 0
    assert "the judge failed on 1: RuntimeError: no idea" in capsys.readouterr().out
    assert main(["rescore", str(run), "--judge", f"{tmp_path / 'other.py'}:never"]) == 1
    assert "a reward of nan" in capsys.readouterr().out
    assert main(["rescore", str(run), "--judge", f"{tmp_path / 'other.py'}:needy"]) == 2
    assert "auxiliary_models" in capsys.readouterr().err
    assert main(["rescore", str(run), "--judge", f"{tmp_path / 'other.py'}:lang"]) == 2
    assert "did you mean 'long'" in capsys.readouterr().err


def test_what_was_trimmed_is_counted_and_the_moments_are_named(tmp_path, capsys):
    """Without an evaluation before, and with the text of the first one dropped: red with "after - before" said of other
    moments than were compared, and with the dropped ones counted nowhere."""
    (tmp_path / "other.py").write_text(JUDGE)
    run = make_run(tmp_path, {})
    with Journal(run / "evaluations.db") as journal:
        for moment, text in (("step-1", "abc"), ("step-2", "abc"), ("step-3", "abcdef")):
            for number in range(12):
                task = Task(id=f"test/{number}", index=number, row={"question": "q"})
                journal.add(answered(f"{moment}/held-out/sampled/{task.id}", task, text, 0.0))
        journal.trim(2)
    Journal(run / "run.db").close()
    words = ["rescore", str(run), "--judge", f"{tmp_path / 'other.py'}:long"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "held-out/sampled, step-3 - step-2: 0.000 [" in out
    assert "12 evaluated rollouts cannot be judged: the run dropped their text (journal.keep_steps): step-1" in out
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["evaluations_trimmed"] == 12
    assert (answer["evaluations"]["held-out/sampled"]["first"], len(answer["evaluations"])) == ("step-2", 1)
