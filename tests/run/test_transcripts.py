"""The rollouts of evaluations: what they said is dropped with that of their steps."""

from dataclasses import replace
from pathlib import Path

from experience_builders import make_call, make_group, make_rollout

from sharpen.learning.experience.reading import read_groups
from sharpen.run.evaluation import Transcripts
from sharpen.show.report.contents import read_evaluated
from sharpen.types import Group


def evaluated(when: str, reward: float = 0.5) -> Group:
    id_ = f"{when}/held-out/sampled/task-0"
    asked = {"role": "user", "content": f"asked {when}"}
    call = make_call(0, [1, 2], [3, 4], messages=(asked,), response={"role": "assistant", "content": f"said {when}"})
    group = make_group([make_rollout([call], reward, id_, 0)], id_)
    return replace(group, task=replace(group.task, id="task-0"))


def trimmed(path: Path) -> list[str]:
    return [group.id.split("/")[0] for group in read_groups(path) if group.rollouts[0].trimmed]


def test_only_evaluations_before_old_steps_lose_their_text(tmp_path: Path) -> None:
    """Red when the evaluations before and after the training go too, which reports compare."""
    path = tmp_path / "evaluations.db"
    transcripts = Transcripts(path)
    transcripts.trim(5)
    assert not path.exists()
    for when in ("before", "step-2", "step-4", "step-6", "after"):
        transcripts.add(evaluated(when))
    transcripts.trim(5)
    transcripts.close()
    assert trimmed(path) == ["step-2", "step-4"]
    content = path.read_bytes()
    assert [f"said {when}".encode() in content for when in ("before", "step-4", "step-6")] == [True, False, True]


def test_a_session_that_has_not_evaluated_trims_those_of_earlier_ones(tmp_path: Path) -> None:
    """Red when only an evaluation opens the journal."""
    for until in (0, 9):
        transcripts = Transcripts(tmp_path / "evaluations.db")
        if not until:
            transcripts.add(evaluated("step-2"))
        transcripts.trim(until)
        transcripts.close()
    assert trimmed(tmp_path / "evaluations.db") == ["step-2"]


def test_a_report_says_that_an_answer_was_dropped(tmp_path: Path) -> None:
    """A run without an evaluation before it compares the first one that it has. Red with an empty answer."""
    transcripts = Transcripts(tmp_path / "evaluations.db")
    transcripts.add(evaluated("step-2", 0.0))
    transcripts.add(evaluated("after", 1.0))
    transcripts.trim(9)
    transcripts.close()
    (task,) = read_evaluated(tmp_path / "evaluations.db").changed
    assert "journal.keep_steps" in task.before.text
    assert task.after.text == "said after"
