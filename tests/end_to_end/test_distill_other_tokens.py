"""A teacher with another tokenizer, from `tune()` to the certificate: the student comes nearer to it, a run goes on
with it, and what needs equal tokens is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from other_tokenizers import TURNS, fast, llama_like, other_teacher, policy_model, word_piece
from toy_model import write_model

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.errors import ConfigError, TrainingError
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import retrain

QUIET: dict[str, Any] = {
    "evaluation.hold_out": False,
    "check.enabled": False,
    "certificate.retrain": "off",
}


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    return policy_model(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return other_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"question": f"question {n % 4}"}) for n in range(40)))
    return folder


async def answers(task, model):
    """Two calls, and no reward."""
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content or "-"}]
        messages += [{"role": "user", "content": "more"}]
    return WorkflowOutput()


async def cut(task, model):
    """An answer of a cut distribution: which of the teacher's tokens would be left of it, nobody knows."""
    await model.client.chat.completions.create(
        model=model.name,
        messages=[{"role": "user", "content": task["question"]}],
        top_p=0.9,
    )
    return WorkflowOutput()


def run(
    root,
    model,
    teacher,
    tasks,
    *,
    steps=2,
    rate=5e-3,
    workflow=answers,
    algorithm="on_policy_distill",
    name=None,
    **settings,
):
    result = tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(tasks), split="train", total_steps=steps),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm, group_size=2, batch_size=4, learning_rate=rate, save_interval_steps=1
        ),
        settings={
            "checkpoint_root_dir": str(root),
            **QUIET,
            **({} if teacher is None else {"distill.teacher_path": str(teacher)}),
            **settings,
        },
        project_name="P",
        experiment_name=name,
    )
    return result.run_dir


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_student_comes_nearer_to_a_teacher_with_other_tokens(tmp_path, student, teacher, tasks, capsys):
    """In 16 steps its answers lose more than two nats a token of what lies between them. Special tokens within answers,
    of which a random model has many, get rare: calls that have some are not left out. The certificate holds; the last
    steps, made once more, agree.

    Break: turn the sign of the chunks' terms around; or leave calls with special tokens out: then they get more.
    """
    made = run(tmp_path, student, teacher, tasks, steps=16, rate=2e-2)
    said = capsys.readouterr().out
    assert "distill.teacher_path: other tokens than the model's (id 0 is '<|endoftext|>' in the model and" in said
    steps = rows(made)
    first, last = (sum(row["trainer/distill_divergence"] for row in some) / 4 for some in (steps[:4], steps[-4:]))
    assert last < first - 2.0
    assert all(row["teacher/tokens_per_chunk"] > 1 for row in steps)
    assert all(row["time/reread_s"] > 0 for row in steps)
    early, late = (sum(row["teacher/calls_with_special"] for row in some) for some in (steps[:4], steps[-4:]))
    assert late < early / 4
    assert all(row["teacher/calls_left_out"] == 0 for row in steps)
    certificate = certify(made)
    assert certificate.holds, certificate.problems
    found = retrain(made, [15, 16])
    assert not found.problems
    assert len(found.repeated) == 2


def test_a_run_goes_on_with_the_same_teacher(tmp_path, student, teacher, tasks):
    """Two steps at once, and the same in two sessions, end with the same numbers."""
    options = {"deterministic": True}
    places = (tmp_path, student, teacher, tasks)
    whole = run(*places, steps=2, name="whole", **options)
    run(*places, steps=1, name="parts", **options)
    parts = run(*places, steps=2, name="parts", **options)
    assert rows(parts)[-1]["trainer/distill_divergence"] == rows(whole)[-1]["trainer/distill_divergence"]
    other = other_teacher(tmp_path / "other", seed=8)
    with pytest.raises(ConfigError, match=r"distill\.teacher_path"):
        run(tmp_path, student, other, tasks, steps=3, name="parts", **options)


def test_a_teacher_like_llama(tmp_path, student, tasks):
    """Whose tokenizer puts a space before a text, and whose template ends an answer with the end of a text."""
    made = fast(llama_like(), eos="</s>", bos="<s>", template=TURNS.replace("<end>", "</s>"))
    run_dir = run(tmp_path, student, write_model(tmp_path / "llama", made), tasks)
    assert all(row["teacher/tokens"] > 0 for row in rows(run_dir))
    assert certify(run_dir).holds
    found = retrain(run_dir)
    assert not found.problems
    assert len(found.repeated) == 2


def test_what_needs_equal_tokens_is_refused_before_anything_is_loaded(tmp_path, student, teacher, tasks):
    def refused(message: str, other: Path = teacher, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            run(tmp_path / "runs", student, other, tasks, **changes)

    refused(r"another vocabulary.*js compares whole distributions: set distill\.divergence to", algorithm="jsd")
    refused("reverse compares whole distributions", **{"distill.divergence": "reverse"})
    refused(r"another vocabulary.*distill\.context is a text", **{"distill.context": "{prompt} {question}"})
    short = write_model(tmp_path / "short", fast(llama_like(), eos="</s>", template=TURNS), longest=64)
    refused("reads at most 64 tokens", short)
    assert not (tmp_path / "runs").exists()
    refused("WordPiece", write_model(tmp_path / "words", fast(word_piece(), eos="[SEP]")))


def test_a_run_of_calls_that_no_teacher_reads_fails_and_says_why(tmp_path, student, teacher, tasks):
    with pytest.raises(TrainingError, match=r"cannot read 8 of the 8 calls of this step.*top_p \(8\)"):
        run(tmp_path, student, teacher, tasks, workflow=cut)
