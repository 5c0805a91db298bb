"""The certificate of a run without rollouts, recomputed offline: it agrees, and sees what was manipulated."""

import json
import shutil
import sqlite3

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.cli.main import main
from sharpen.config.run import SupervisedConfig
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.gateway.render import Renderer
from sharpen.learning.supervised.batches import row_digest, taught_row
from sharpen.learning.supervised.lessons import Tutor
from sharpen.learning.trainer.checksums import write_checksums
from sharpen.types import Task

SAID = ("yes", "no", "perhaps")


def turns(i):
    """Two turns of the assistant each, so that a row has more tokens than its last answer."""
    return {
        "messages": [
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": SAID[i % 3]},
            {"role": "user", "content": "sure?"},
            {"role": "assistant", "content": SAID[(i + 1) % 3]},
        ]
    }


LONG = {"messages": [{"role": "user", "content": "long " * 99}, {"role": "assistant", "content": "a"}]}
ROWS = {
    "sft": [*(turns(i) for i in range(16)), LONG],
    "cpt": [*({"text": f"text {i} " * (4 + 20 * (i % 2))} for i in range(12)), {"text": ""}],
    "dpo": [{"prompt": f"question {i}", "chosen": "yes", "rejected": "no"} for i in range(12)],
}


def train(folder, model, kind, **settings):
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
    return tune(
        train_dataset=DatasetConfig(path=str(path), total_steps=7),
        model=TunerModelConfig(model_path=str(model), max_model_len=64),
        algorithm=AlgorithmConfig(
            algorithm_type=kind, batch_size=4, learning_rate=1e-2, save_interval_steps=3, eval_interval_steps=4
        ),
        settings={"checkpoint_root_dir": str(folder / "runs"), "trainer.keep_checkpoints": 9, **settings},
        experiment_name=kind,
    ).run_dir


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_model_dir):
    """A run of each kind, seven steps (several epochs), checkpoints after 3, 4, 6 and 7."""
    folder = tmp_path_factory.mktemp("taught")
    kl = {"loss.kl": "k1", "loss.kl_coef": 0.1, "loss.policy_loss_args": {"label_smoothing": 0.1}}
    return {kind: train(folder, toy_model_dir, kind, **(kl if kind == "dpo" else {})) for kind in ROWS}


@pytest.mark.parametrize("kind", ROWS)
def test_the_updates_made_once_more_give_the_weights(finished, kind):
    """Also where several steps lie between two checkpoints."""
    found = retrain(finished[kind])
    assert not found.problems
    assert not found.not_repeated
    assert [(one.first, one.last) for one in found.repeated] == [(1, 3), (4, 4), (5, 6), (7, 7)]


@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy of the sft run to spoil, with a dataset of its own."""
    copied = shutil.copytree(finished["sft"], tmp_path / "run", symlinks=True)
    data = shutil.copy(finished["sft"].parents[2] / "sft.jsonl", tmp_path / "sft.jsonl")
    resolved = json.loads((copied / "resolved.json").read_text())
    resolved["train_dataset.path"]["value"] = str(data)
    (copied / "resolved.json").write_text(json.dumps(resolved))
    return copied


def edit(run_dir, statement, *values):
    with sqlite3.connect(run_dir / "run.db") as connection:
        assert connection.execute(statement, values).rowcount > 0


@pytest.mark.parametrize("kind", ROWS)
def test_what_is_recomputed_agrees_with_what_the_run_wrote(finished, kind):
    """Red when `recompute` draws from all rows, those held out included, or measures pairs without their KL term."""
    found = certify(finished[kind])
    assert found.holds, found.problems
    assert found.not_recomputed == ()
    written = json.loads((finished[kind] / "certificate.json").read_text())
    content = json.loads(json.dumps(found.to_json()))
    assert content["checks"] == written["checks"]
    assert content["rows"] == written["rows"]
    assert sum(written["rows"].values()) == 7 * 4
    # Held out: before, after 4 and after 7; steps 1, 4, 5 and 7 began with weights that are still there.
    assert found.losses.steps == (0, 3, 4, 6, 7)
    assert found.losses.compared == 3 + 4
    assert found.losses.max < 1e-4
    assert {"sft": "too long", "cpt": "empty", "dpo": "trained"}[kind] in written["rows"]


def test_digests_tell_row_and_mask_apart(toy_model_dir):
    """Red when `taught_row` takes the ids alone: these are the same, whichever turns are taught."""
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    row = Task(id="sft/0", index=0, row=turns(0))
    every, last = (
        taught_row(
            row,
            Tutor(
                tokenizer=tokenizer,
                renderer=Renderer(tokenizer),
                end_ids=frozenset([tokenizer.eos_token_id]),
                max_model_len=64,
                data="conversations",
                fields=SupervisedConfig(turns=which),
            ).lesson(row),
        )
        for which in ("all", "last")
    )
    assert every.row_digest == last.row_digest
    assert every.ids_digest != last.ids_digest
    assert every.num_tokens > last.num_tokens
    assert row_digest(Task(id="sft/0", index=0, row=turns(1))) != every.row_digest


def test_several_updates_of_a_step_are_checked_but_their_losses_are_not_measured(tmp_path, toy_model_dir):
    run_dir = train(tmp_path, toy_model_dir, "sft", **{"trainer.num_minibatches": 2, "trainer.epochs": 2})
    found = certify(run_dir)
    assert found.holds, found.problems
    assert found.losses.compared == 3


def test_the_command_says_it_in_lines_and_its_code_is_the_verdict(finished, run_dir, capsys):
    assert main(["certify", str(finished["sft"])]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split()[:2] == ["ok", "rows"]
    assert "losses                  7 compared" in printed
    assert "rows         " in printed
    assert "too long" in printed
    assert "rollouts" not in printed
    assert lines[-1] == f"certified: 7 steps of {finished['sft']}"
    edit(run_dir, "DELETE FROM taught WHERE step = 2 AND rowid = (SELECT MAX(rowid) FROM taught WHERE step = 2)")
    assert main(["certify", str(run_dir), "--no-logprobs"]) == 1
    assert "step 2: trained on fewer, but its order draws" in capsys.readouterr().out


def test_a_row_that_was_not_drawn_is_found(run_dir):
    edit(run_dir, "UPDATE taught SET row_id = 'sft/999' WHERE rowid = (SELECT MIN(rowid) FROM taught WHERE step = 3)")
    assert any(
        problem.startswith("step 3: trained on sft/999") for problem in certify(run_dir, logprobs=False).problems
    )


def test_other_tokens_than_the_text_gives_are_found(run_dir):
    """Such as those of another mask: digests are of ids and mask."""
    edit(run_dir, "UPDATE taught SET ids_digest = x'00' WHERE rowid = (SELECT MIN(rowid) FROM taught WHERE step = 5)")
    problems = certify(run_dir, logprobs=False).problems
    assert any(
        problem.startswith("step 5: row ") and "other tokens or images than it gives" in problem for problem in problems
    )


def test_token_counts_that_do_not_add_up_are_found(run_dir):
    edit(run_dir, "UPDATE taught SET num_tokens = num_tokens + 1 WHERE step = 1")
    problems = certify(run_dir, logprobs=False).problems
    assert any("step 1: its rows have trainer/trained_tokens" in problem for problem in problems)


@pytest.mark.parametrize("amount", [0.05, float("nan")])
def test_weights_that_do_not_have_the_noted_losses_are_found(run_dir, amount):
    """Red when a loss that is not a number passes for one within the bound."""
    file = run_dir / "global_step_4" / "model.safetensors"
    weights = load_file(file)
    noise = torch.Generator().manual_seed(0)
    save_file(
        {name: w + amount * torch.randn(w.shape, generator=noise).to(w.dtype) for name, w in weights.items()},
        file,
        metadata={"format": "pt"},
    )
    (problem,) = certify(run_dir).problems
    assert problem.startswith("global_step_4 does not hold the weights that were saved: model.safetensors ")
    write_checksums(file.parent)  # as one would who wants them to pass for what was saved
    problems = certify(run_dir).problems
    assert any("the held-out loss after step 4 " in problem for problem in problems)
    assert any("the loss of step 5 " in problem for problem in problems)
    assert not any("step 7" in problem for problem in problems)


def test_a_noted_loss_that_was_changed_is_found(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == 7 and "eval/loss" in line:
            line["eval/loss"] = 0.01
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert any("after step 7 was recorded as 0.01" in problem for problem in certify(run_dir).problems)


def test_a_row_that_was_edited_since_is_named_and_the_others_are_still_checked(run_dir):
    path = run_dir.parent / "sft.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    with sqlite3.connect(run_dir / "run.db") as connection:
        (name,) = connection.execute("SELECT row_id FROM taught WHERE num_tokens > 0 LIMIT 1").fetchone()
    rows[int(name.split("/")[1])] = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    }
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = certify(run_dir, logprobs=False)
    assert found.holds, found.problems
    (missing,) = found.not_recomputed
    assert missing.startswith("steps with rows that have changed since: ")
    assert f"first step 1, row {name}" in missing


@pytest.mark.parametrize("change", ["gone", "shorter"])
def test_a_dataset_that_is_another_one_now_is_said(run_dir, change, capsys):
    path = run_dir.parent / "sft.jsonl"
    if change == "gone":
        path.unlink()
    else:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:10]))
    found = certify(run_dir)
    assert found.holds, found.problems
    missing = found.not_recomputed[0]
    assert missing.startswith("the rows, and everything made from them: ")
    assert len(found.not_recomputed) == (1 if change == "gone" else 2), "held-out rows are others, too"
    assert ("does not exist" in missing) if change == "gone" else ("there were 16 to train on" in missing)
    assert {check.name for check in found.checks} == {"rows", "mask", "rendered"}
    assert found.losses is None
    assert main(["certify", str(run_dir)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("certified, except for what was not recomputed: 7 steps")


def test_a_held_out_row_that_was_edited_since_is_said_and_no_loss_of_it_is_measured(run_dir):
    path = run_dir.parent / "sft.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    with sqlite3.connect(run_dir / "run.db") as connection:
        (name,) = connection.execute("SELECT row_id FROM taught WHERE step = 0").fetchone()
    rows[int(name.split("/")[1])] = turns(99)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = certify(run_dir)
    assert found.holds, found.problems
    assert found.not_recomputed == ("the held-out losses: the held-out rows have changed since, or were not recorded",)
    assert found.losses.compared == 4


def test_a_model_that_is_gone_leaves_everything_but_the_losses(run_dir):
    resolved = json.loads((run_dir / "resolved.json").read_text())
    resolved["model.model_path"]["value"] = "/nowhere/model"
    (run_dir / "resolved.json").write_text(json.dumps(resolved))
    found = certify(run_dir)
    assert found.holds, found.problems
    assert found.not_recomputed == ("the losses: model_path '/nowhere/model' does not exist",)
    assert found.losses is None


def test_a_run_that_did_not_note_its_rows_is_checked_by_its_order(run_dir):
    with sqlite3.connect(run_dir / "run.db") as connection:
        connection.execute("DROP TABLE taught")
    found = certify(run_dir, logprobs=False)
    assert found.holds, found.problems
    (missing,) = found.not_recomputed
    assert missing.startswith("which rows were trained in 7 steps, first step 1")


def test_a_run_that_goes_on_in_a_second_session_is_certified_whole(tmp_path, toy_model_dir):
    train(tmp_path, toy_model_dir, "sft", **{"train_dataset.total_steps": 3})
    run_dir = train(tmp_path, toy_model_dir, "sft")
    found = certify(run_dir, logprobs=False)
    assert found.holds, found.problems
    assert found.steps == 7
