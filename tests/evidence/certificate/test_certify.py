"""The run certificate: what a run writes, what is recomputed offline, and that both see a manipulated record."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty_update import two_calls
from safetensors.torch import load_file, save_file

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.cli.main import main
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify, read_resolved
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.learning.experience.entropies import read_entropies
from sharpen.learning.experience.evidence import read_delivery
from sharpen.learning.experience.opening import open_journal
from sharpen.learning.experience.reading import read_groups, read_steps
from sharpen.learning.trainer.checkpoint import pointed
from sharpen.learning.trainer.checksums import CHECKSUMS, write_checksums


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_model_dir, toy_dataset):
    """A run of three steps with two minibatches each, a checkpoint after every step."""
    result = tune(
        workflow_func=two_calls,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=3),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=256, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo", group_size=4, batch_size=4, learning_rate=1e-2, save_interval_steps=1
        ),
        settings={
            "checkpoint_root_dir": str(tmp_path_factory.mktemp("certify")),
            "trainer.num_minibatches": 2,
            "trainer.keep_checkpoints": 10,
            "evaluation.before_and_after": False,
            "rollout.failure_reward": 0.0,
        },
    )
    return result.run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def test_a_run_writes_a_certificate_that_holds_and_certify_agrees(finished):
    written = json.loads((finished / "certificate.json").read_text())
    assert written["holds"] is True
    assert written["steps"] == 3
    found = certify(finished)
    assert found.holds, found.problems
    assert json.loads(json.dumps(found.to_json()))["checks"] == written["checks"]
    checked = {check.name: check.checked for check in found.checks}
    assert checked["accounted"] == 3 * 4 * 4
    assert checked["ids"] > checked["loss_mask"] > 0
    # Only versions with a checkpoint can be scored again; that of each step's first update and the start's are there.
    assert found.logprob_gaps.versions == (0, 2, 4)
    assert found.logprob_gaps.max < 1e-4
    assert written["logprob_gaps"]["max"] < 1e-4
    assert written["outcomes"] == {"ok": 48}


def test_the_updates_made_once_more_give_the_weights(finished):
    found = retrain(finished)
    assert not found.problems
    assert not found.not_repeated
    assert [(one.first, one.last) for one in found.repeated] == [(1, 1), (2, 2), (3, 3)]
    assert all(one.cosine > 1 - 1e-6 for one in found.repeated)


def test_the_configuration_comes_back_from_resolved_json(finished):
    config = read_resolved(finished / "resolved.json")
    assert config.trainer.num_minibatches == 2
    assert config.algorithm.group_size == 4


def test_each_trained_token_has_its_entropy_in_the_journal_and_the_certificate_needs_none(finished, run_dir):
    """Their mean is the step's metric, which is made of the sums on the trainer's side; spans say which are trained."""
    steps = {one.step: one.metrics["trainer/entropy"] for one in read_steps(finished / "run.db")}
    rollouts = [rollout for group in read_groups(finished / "run.db") for rollout in group.rollouts]
    with closing(open_journal(finished / "run.db")) as journal:
        for step, mean in steps.items():
            spans = read_delivery(finished / "run.db", step).spans
            found = {rollout.id: read_entropies(journal, rollout, [step]) for rollout in rollouts}
            for span in spans:
                if span.advantages_S.any():  # where all advantages are 0, only some sequences are computed
                    assert np.isfinite(found[span.rollout_id][span.call]).sum() == len(span.places_S)
            entropies = np.concatenate([one for calls in found.values() for one in calls.values()])
            assert np.nanmean(entropies.astype(np.float64)) == pytest.approx(mean, rel=1e-3)
    edit(run_dir, "DELETE FROM entropies")
    assert certify(run_dir).holds


def edit(run_dir, statement, *values):
    with sqlite3.connect(run_dir / "run.db") as connection:
        assert connection.execute(statement, values).rowcount > 0


def test_an_advantage_that_was_not_what_the_rewards_say_is_found(run_dir):
    edit(run_dir, "UPDATE rollouts SET reward = reward + 0.5 WHERE idx = 0")
    problems = certify(run_dir, logprobs=False).problems
    assert any("was trained on" in problem and "expected" in problem for problem in problems)


def test_a_call_that_was_not_trained_is_found(run_dir):
    edit(run_dir, "DELETE FROM trained WHERE step = 2 AND call = 0")
    problems = certify(run_dir, logprobs=False).problems
    assert any(problem.startswith("step 2: ") and "takes part, but was not trained" in problem for problem in problems)


def test_a_missing_rollout_is_found(run_dir):
    edit(run_dir, "UPDATE rollouts SET is_final = 0 WHERE idx = 3")
    assert any("accounted" in problem for problem in certify(run_dir, logprobs=False).problems)


def test_recorded_logprobs_of_another_model_are_found(run_dir):
    """Red when `certify` scores nothing again."""
    with sqlite3.connect(run_dir / "run.db") as connection:
        rows = connection.execute("SELECT rowid, logprobs FROM calls").fetchall()
        for rowid, blob in rows:
            shifted = np.frombuffer(blob, "<f4") - np.float32(0.01)
            connection.execute("UPDATE calls SET logprobs = ? WHERE rowid = ?", (shifted.tobytes(), rowid))
    problems = certify(run_dir).problems
    assert any("trainer and engine differ at policy version 0" in problem for problem in problems)


def test_weights_that_are_not_those_that_sampled_are_found(run_dir):
    file = run_dir / "global_step_1" / "model.safetensors"
    weights = load_file(file)
    noise = torch.Generator().manual_seed(0)
    spoilt = {name: w + 0.05 * torch.randn(w.shape, generator=noise).to(w.dtype) for name, w in weights.items()}
    save_file(spoilt, file, metadata={"format": "pt"})
    write_checksums(file.parent)  # as one would who wants them to pass for what was saved
    problems = certify(run_dir).problems
    assert any("differ at policy version 2" in problem for problem in problems)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_bit_that_changed_in_the_weights_is_said(finished, run_dir):
    """Red without checksums: the last weights sampled no recorded token, so that nothing else looks at them."""
    latest = pointed(run_dir, "latest")
    flip_a_bit(latest / "model.safetensors")
    (problem,) = certify(run_dir, logprobs=False).problems
    assert problem.startswith(latest.name)
    assert "model.safetensors changed" in problem


def test_earlier_weights_that_changed_are_a_problem_too_and_nothing_is_computed_with_them(finished, run_dir):
    earlier = run_dir / "global_step_1"
    assert earlier != pointed(run_dir, "latest")
    flip_a_bit(earlier / "model.safetensors")
    found = certify(run_dir)
    (problem,) = found.problems
    assert problem.startswith("global_step_1 ")
    assert "model.safetensors changed" in problem
    assert any("have no checkpoint" in what for what in found.not_recomputed)


def test_only_weights_and_state_are_compared_and_the_optimizer_may_be_gone(finished, run_dir):
    """Red when the optimizer, most of a checkpoint's bytes, is read to certify weights."""
    state = pointed(run_dir, "latest") / "trainer_state"
    flip_a_bit(state / "optimizer.safetensors")
    (state / "random.safetensors").unlink()
    found = certify(run_dir, logprobs=False)
    assert found.holds, found.problems
    flip_a_bit(state / "state.json")
    (run_dir / "latest").unlink()  # else its state would be read before
    (run_dir / "best").unlink(missing_ok=True)
    (run_dir / "best").symlink_to(state.parent.name)
    assert "trainer_state/state.json changed" in certify(run_dir, logprobs=False).problems[-1]


def test_weights_under_another_name_and_added_ones_are_found(finished, run_dir):
    """Red when files that are gone, or have no checksum, say nothing: both are what transformers would not load, or
    would load in place of what was saved."""
    latest = pointed(run_dir, "latest")
    (latest / "model.safetensors").rename(latest / "model-00001-of-00001.safetensors")
    (problem,) = certify(run_dir, logprobs=False).problems
    assert "model-00001-of-00001.safetensors and model.safetensors changed" in problem


def test_checksums_that_are_gone_are_said_and_empty_ones_are_a_problem(finished, run_dir):
    sums = pointed(run_dir, "latest") / CHECKSUMS
    sums.write_bytes(b"")
    (problem,) = certify(run_dir, logprobs=False).problems
    assert CHECKSUMS in problem
    sums.unlink()
    found = certify(run_dir, logprobs=False)
    assert found.holds, found.problems
    said = [what for what in found.not_recomputed if CHECKSUMS in what]
    assert len(said) == 1
    assert sums.parents[1].name in said[0]


def test_a_copy_of_a_checkpoint_beside_the_others_is_none_of_them(finished, run_dir):
    shutil.copytree(run_dir / "global_step_1", run_dir / "global_step_1_backup")
    flip_a_bit(run_dir / "global_step_1_backup" / "model.safetensors")
    found = certify(run_dir)
    assert found.holds, found.problems


def test_what_is_no_run_directory_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no run\.db"):
        certify(tmp_path)


def test_the_command_prints_one_line_for_each_invariant_and_its_code_is_the_verdict(finished, run_dir, capsys):
    assert main(["certify", str(finished)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "ids", f"{json_checks(finished)['ids']:,}", "checked"]
    assert lines[-1] == f"certified: 3 steps of {finished}"
    edit(run_dir, "DELETE FROM trained WHERE step = 2")
    assert main(["certify", str(run_dir), "--no-logprobs"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("NOT certified")


def json_checks(run_dir):
    return {
        check["name"]: check["checked"] for check in json.loads((run_dir / "certificate.json").read_text())["checks"]
    }
