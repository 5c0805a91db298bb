"""The verdict computed again from the rollouts of the evaluations: faults planted in them and in the summary."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.main import main
from sharpen.evidence.certificate.certify import Settings, certify, read_resolved
from sharpen.evidence.certificate.lineage import read_lineage
from sharpen.evidence.certificate.verdict import judge_again


async def prefers_letter(task, model):
    """The reward is the share of the letter 'e'; an answer without any fails."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    text = reply.choices[0].message.content or ""
    if "e" not in text:
        raise ValueError("no e")
    return WorkflowOutput(reward=text.count("e") / 8)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_model_dir, toy_dataset):
    """A run of four steps that is evaluated before, after step 2 and after, on two sets; failures count 0."""
    return tune(
        workflow_func=prefers_letter,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=4),
        eval_dataset=DatasetConfig(path=str(toy_dataset), split="test"),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo", group_size=8, batch_size=4, learning_rate=2e-2, eval_interval_steps=2
        ),
        settings={
            "checkpoint_root_dir": str(tmp_path_factory.mktemp("judged")),
            "check.enabled": False,
            "rollout.failure_reward": 0.0,
            "evaluation.further.more": {"path": str(toy_dataset), "split": "test"},
        },
    ).run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def in_records(run_dir: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run_dir / "evaluations.db")) as connection, connection:
        for statement in statements:
            assert connection.execute(statement).rowcount


def in_summary(run_dir: Path, change: Callable[[Any], None]) -> None:
    content = json.loads((run_dir / "summary.json").read_text())
    change(content)
    (run_dir / "summary.json").write_text(json.dumps(content))


def problems(run_dir: Path) -> str:
    settings = Settings.of(run_dir, read_resolved(run_dir / "resolved.json"))
    return "\n".join(judge_again(run_dir, settings.config, read_lineage(run_dir)).problems)


def test_an_honest_run_is_certified_with_its_verdict(finished, capsys):
    assert main(["certify", str(finished), "--no-logprobs"]) == 0
    kind = json.loads((finished / "summary.json").read_text())["verdict"]["kind"]
    assert f"ok  verdict      80 rewards read again: {kind}" in capsys.readouterr().out


AFTER = "group_id LIKE 'after/held-out/sampled/%'"
DROP = (
    "DELETE FROM calls WHERE rollout_key IN (SELECT key FROM rollouts WHERE {0})",
    "DELETE FROM groups WHERE key IN (SELECT group_key FROM rollouts WHERE {0})",
    "DELETE FROM rollouts WHERE {0}",
)


def dropped(which: str) -> tuple[str, ...]:
    return tuple(statement.format(which) for statement in DROP)


def twice(group: str) -> tuple[str, ...]:
    """The group of one task once more, at the end."""
    columns = {
        "groups": ("id", "version", "task_id", "task_index", "task_row"),
        "rollouts": ("id", "group_id", "task_id", "idx", "attempt", "is_final", "outcome", "reward", "metrics"),
    }
    rest = ("call_rewards", "error", "seconds")
    return (
        f"INSERT INTO groups ({', '.join(columns['groups'])}) SELECT {', '.join(columns['groups'])} FROM groups"
        f" WHERE id = '{group}'",
        f"INSERT INTO rollouts (group_key, {', '.join((*columns['rollouts'], *rest))}) SELECT (SELECT MAX(key) FROM"
        f" groups), {', '.join((*columns['rollouts'], *rest))} FROM rollouts WHERE group_id = '{group}'",
    )


@pytest.mark.parametrize(
    ("statements", "sentence"),
    [
        ((f"UPDATE rollouts SET reward = 1.0 WHERE {AFTER} AND task_id = 'test/3'",), "test/3 has 1.0 in the records"),
        (dropped(f"{AFTER} AND task_id = 'test/3'"), "after, held-out, sampled: 1 tasks were not evaluated: test/3"),
        (dropped(f"{AFTER} AND reward = 0"), "after, held-out, sampled: {zeros} tasks were not evaluated"),
        (dropped(AFTER), "has no evaluation after, held-out, sampled"),
        (dropped("group_id LIKE 'after/more/greedy/%'"), "has no evaluation after, more, greedy"),
        (dropped("group_id LIKE 'step-2/held-out/%'"), "evaluated, the checkpoint says step"),
        (dropped("task_id = 'test/3'"), "summary.json says num_tasks 10, the records 9"),
        (
            twice("after/held-out/sampled/test/3"),
            "after, held-out, sampled: 1 tasks were evaluated more than once: test/3",
        ),
        (
            dropped("group_id LIKE 'step-2/held-out/greedy/%' AND task_id = 'test/3'"),
            "step-2, held-out, greedy: 1 tasks were not evaluated: test/3",
        ),
        (dropped("group_id LIKE 'step-2/held-out/greedy/%'"), "has no evaluation step-2, held-out, greedy"),
        (
            (
                "UPDATE calls SET temperature = 1 WHERE rollout_key IN (SELECT key FROM rollouts WHERE group_id LIKE"
                " 'before/held-out/greedy/%')",
            ),
            "before, held-out, greedy: 10 of 10 calls are not at temperature 0",
        ),
        (
            (
                "UPDATE rollout_notes SET started = 7.0 WHERE rollout_key IN (SELECT key FROM rollouts WHERE task_id ="
                " 'test/3' AND group_id LIKE 'after/held-out/%')",
            ),
            "after, held-out, sampled: 1 rollouts are those of (after, held-out, greedy)",
        ),
        (("UPDATE groups SET version = 2 WHERE id LIKE 'after/%'",), "has no evaluation after, held-out, greedy"),
    ],
)
def test_a_fault_in_the_records_is_named(run_dir, statements, sentence):
    zeros = f"SELECT COUNT(*) FROM rollouts WHERE {AFTER} AND reward = 0"
    with closing(sqlite3.connect(run_dir / "evaluations.db")) as connection:
        sentence = sentence.format(zeros=connection.execute(zeros).fetchone()[0])
    in_records(run_dir, *statements)
    assert sentence in problems(run_dir)


def greedy_twice(content: Any) -> None:
    for moment in ("before", "after"):
        content[moment]["sampled"] = content[moment]["greedy"]


def another(name: str, value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        *path, last = name.split(".")
        for part in path:
            content = content[part]
        assert content[last] != value
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (greedy_twice, "after, held-out, sampled: summary.json says accuracy 1.0"),
        (another("after.sampled.accuracy", 0.9), "after, held-out, sampled: summary.json says accuracy 0.9"),
        (another("after.sampled.num_tasks", 7), "after, held-out, sampled: summary.json says num_tasks 7"),
        (another("further.more.after.sampled.high", 0.99), "after, more, sampled: summary.json says high 0.99"),
        (another("verdict.kind", "better"), "the verdict is 'better', but the records say 'not_shown'"),
        (another("verdict.kind", "worse"), "the verdict is 'worse', but the records say 'not_shown'"),
        (another("verdict.original", False), "but the records say 'not_shown'"),
        (another("verdict.text", "better by +0.6"), "its sentence is 'better by +0.6'"),
        (another("verdict.low", -0.01), "the verdict: summary.json says low -0.01"),
        (another("verdict.measure", "greedy reward"), "by 'greedy reward', the settings and records say 'sampled"),
        (another("verdict.step", 2), "the verdict: summary.json says step 2"),
        (another("after", None), "has the evaluation after, summary.json does not"),
        (another("after.greedy", None), "after, held-out, greedy: summary.json says accuracy None"),
        (another("further", None), "has the evaluation after, more, summary.json does not"),
        (another("further.more.before", []), "further.more.before: 'before' is no object"),
        (another("verdict", "better"), "verdict: 'verdict' is no object"),
    ],
)
def test_a_fault_in_the_summary_is_named(run_dir, change, sentence):
    in_summary(run_dir, change)
    assert sentence in problems(run_dir)


def test_what_cannot_be_computed_again_is_named(run_dir):
    for name, reason in (
        ("evaluations.db", "there is no evaluations.db"),
        ("summary.json", "there is no summary.json"),
    ):
        (run_dir / name).rename(run_dir / "away")
        found = certify(run_dir, logprobs=False)
        assert found.holds
        assert found.verdict == ""
        assert any(reason in sentence for sentence in found.not_recomputed)
        (run_dir / "away").rename(run_dir / name)
    in_summary(run_dir, another("steps", 2))
    assert any(
        "is of step 2, the weights are of step 4" in one for one in certify(run_dir, logprobs=False).not_recomputed
    )


def test_sampled_evaluations_without_sampling_are_named(run_dir):
    """An agent that knows that it is evaluated may ask for it, so that it is no contradiction."""
    in_records(
        run_dir,
        f"UPDATE calls SET temperature = 0 WHERE rollout_key IN (SELECT key FROM rollouts WHERE {AFTER})",
    )
    found = certify(run_dir, logprobs=False)
    assert found.holds
    assert any("after, held-out, sampled: all calls are at temperature 0" in one for one in found.not_recomputed)


def test_a_verdict_without_any_evaluation_is_named(run_dir):
    """Red when the evaluations' absence hides a verdict."""
    (run_dir / "evaluations.db").unlink()

    def nothing_else(content: Any) -> None:
        content |= {"before": None, "after": None, "verdict": {**content["verdict"], "kind": "better"}}

    in_summary(run_dir, nothing_else)
    found = certify(run_dir, logprobs=False)
    assert [one for one in found.not_recomputed if "there is no evaluations.db" in one]


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"steps": 4, "further": 1}'])
def test_a_damaged_summary_is_a_problem_and_no_exception(run_dir, text):
    (run_dir / "summary.json").write_text(text)
    assert "summary.json is damaged" in problems(run_dir) or "is no object" in problems(run_dir)


def test_a_problem_of_the_verdict_fails_the_command(run_dir, capsys):
    in_summary(run_dir, another("verdict.kind", "better"))
    assert main(["certify", str(run_dir), "--no-logprobs"]) == 1
    assert "NOT certified" in capsys.readouterr().out
