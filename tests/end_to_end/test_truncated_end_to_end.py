"""Runs with top_p and top_k: tokens of a truncated distribution train and are compared among what was left of it."""

import json
import sqlite3
from contextlib import closing

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.errors import ConfigError, SamplingError
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import with_updates
from sharpen.learning.experience.merge import merge
from sharpen.learning.experience.reading import read_groups


async def answers(task, model):
    """One call with the run's sampling, one after an answer with the agent's own, and the share of the letter 'e' as
    reward."""
    ask = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=ask)
    ask += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    own = await model.client.chat.completions.create(model=model.name, messages=ask, top_p=task["top_p"])
    text = (reply.choices[0].message.content or "") + (own.choices[0].message.content or "")
    return WorkflowOutput(reward=text.count("e") / 12)


def run(
    folder, model, algorithm="raft", *, agent_top_p=1.0, group_size=1, loss=None, engine="auto", check=False, **sampling
):
    rows = [{"question": f"say e {number}", "top_p": agent_top_p} for number in range(8)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tune(
        workflow_func=answers,
        train_dataset=DatasetConfig(path=str(folder / "tasks.jsonl"), total_steps=2),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=6, **sampling),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm, group_size=group_size, batch_size=2, learning_rate=1e-2, save_interval_steps=1
        ),
        settings={
            "checkpoint_root_dir": str(folder / "runs"),
            **({"loss": loss} if loss else {}),
            "engine.type": engine,
            "evaluation.hold_out": False,
            "check.enabled": check,
            "certificate.retrain": "off",  # a test makes the steps once more itself, all of them
        },
    ).run_dir


EVERY = {"advantage": "every_rollout"}


def steps(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("algorithm", "loss"), [("grpo", None), ("raft", EVERY), ("dppo", {"echo": 0.2}), ("otb", None)]
)
def test_tokens_of_a_truncated_distribution_train_and_are_compared(tmp_path, toy_model_dir, algorithm, loss):
    """All tokens are truncated in both steps, by the run or by the agent: all are compared, by the trainer, the
    certificate and its plain loop, and one algorithm's gradients before the first step too. Red when supports are lost
    on the way, when a row gets another's, or when the ratio is to the whole distribution."""
    sampling = {"top_p": 0.8, "top_k": 9, "min_p": 0.01}
    checked = algorithm == "grpo"
    run_dir = run(
        tmp_path, toy_model_dir, algorithm, group_size=4, loss=loss, agent_top_p=0.9, check=checked, **sampling
    )
    trained = [row for row in steps(run_dir) if row.get("batch/loss_tokens")]
    assert len(trained) == 2
    for row in trained:
        assert row["batch/loss_tokens_truncated"] == 0
        assert row["trainer/logprob_gap_tokens"] > 0
        assert row["trainer/logprob_gap_max"] < 1e-4
        assert row["trainer/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert row["trainer/grad_norm"] > 0
        assert ("trainer/echo_loss" in row) == (algorithm == "dppo")
    written = json.loads((run_dir / "certificate.json").read_text())
    assert written["holds"], written["problems"]
    assert written["truncated_tokens"] == 0
    found = with_updates(certify(run_dir), run_dir, (), print)
    assert found.holds, found.problems
    assert len(found.repeated) == 2
    assert not any("top_p" in one for one in found.not_recomputed)


def test_the_certificate_sees_a_support_that_is_lost_or_another(tmp_path, toy_model_dir):
    """A support with one id more has another logprob; one without the token is named."""
    run_dir = run(tmp_path, toy_model_dir, "grpo", group_size=4, top_k=5)
    with closing(sqlite3.connect(run_dir / "run.db")) as connection, connection:
        rows = connection.execute("SELECT rowid, packed FROM call_supports").fetchall()
        assert rows
        changed = [(bytes([packed[0] + 1]) + packed[1:], key) for key, packed in rows]
        connection.executemany("UPDATE call_supports SET packed = ? WHERE rowid = ?", changed)
    found = certify(run_dir)
    assert not found.holds
    assert any("is not in its recorded support" in one for one in found.problems)
    with closing(sqlite3.connect(run_dir / "run.db")) as connection, connection:
        connection.execute("UPDATE call_supports SET vocab_size = 1 << 40")
    assert any(f"supports among {1 << 40} ids are recorded" in one for one in certify(run_dir).problems)


def test_a_journal_without_supports_is_read_and_its_tokens_are_not_compared(tmp_path, toy_model_dir):
    run_dir = run(tmp_path, toy_model_dir, loss=EVERY, agent_top_p=0.5)
    with closing(sqlite3.connect(run_dir / "run.db")) as connection, connection:
        assert connection.execute("DELETE FROM call_supports").rowcount > 0
    found = certify(run_dir)
    assert any("tokens sampled with top_p, top_k or min_p" in one for one in found.not_recomputed)
    assert not found.holds, "these are not the records that were trained"
    (group, *_) = read_groups(run_dir / "run.db")
    with pytest.raises(SamplingError, match="did not record which tokens that left"):
        merge(group.rollouts[0])
    assert merge(group.rollouts[0], needs_ratio=False)


@pytest.mark.parametrize(
    ("algorithm", "sampling", "words"),
    [
        ("grpo", {"top_k": 9}, "model.top_k is 9, but 'grpo' needs"),
        ("grpo", {"top_p": 0.9}, "model.top_p is 0.9, but 'grpo' needs"),
        ("grpo", {"min_p": 0.1}, "model.min_p is 0.1, but 'grpo' needs"),
        ("opmd", {"top_k": 9, "loss": {"kl": "corrected_k3"}}, "model.top_k is 9, but 'opmd' needs"),
        ("opmd", {"top_k": 9, "loss": {"kl_in": "reward"}}, "model.top_k is 9, but 'opmd' needs"),
    ],
)
def test_what_needs_the_record_refuses_truncation_by_vllm(tmp_path, toy_model_dir, algorithm, sampling, words):
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, toy_model_dir, algorithm, group_size=2, engine="vllm", **sampling)


def test_raft_of_one_says_how_every_rollout_is_imitated(tmp_path, toy_model_dir):
    with pytest.raises(ConfigError, match=r"group_size is 1.*loss.advantage to every_rollout"):
        run(tmp_path, toy_model_dir)


def test_settings_of_rewards_have_no_effect_where_every_rollout_is_imitated(tmp_path, toy_model_dir):
    with pytest.raises(ConfigError, match=r"loss.std_threshold is 0.1, but 'raft' learns from every rollout alike"):
        run(tmp_path, toy_model_dir, loss={**EVERY, "std_threshold": 0.1})
