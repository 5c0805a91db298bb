"""Commands over a run whose files are damaged: what can be answered is, the rest is one line that names the file."""

import shutil

import pytest
from shop_runs import Maker, RunSize, make_run

from sharpen.cli.main import main

ROLLOUT = "step-0/train/0/0"
CONTENTS = ("", "[]", '{"a": ', '{"verdict": 5, "before": 3, "model.model_path": 3}')


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    size = RunSize(steps=2, batch_size=1, group_size=2, tasks=2, held_out=2, evaluations=())
    return make_run(tmp_path_factory.mktemp("runs") / "whole", Maker(size=size))


@pytest.fixture
def run(whole, tmp_path):
    """A copy, to be damaged."""
    return shutil.copytree(whole, tmp_path / "run", symlinks=True)


def answer(capsys, *words):
    code = main(list(words))
    written = capsys.readouterr()
    return code, written.out, written.err


@pytest.mark.parametrize("content", CONTENTS)
def test_without_its_settings_a_run_is_shown_and_not_certified(run, capsys, content):
    (run / "resolved.json").write_text(content)
    code, out, _ = answer(capsys, "show", str(run), "--rollout", ROLLOUT)
    assert (code, "there are" in out) == (0, True)
    for words in (["certify", str(run), "--no-logprobs"], ["diagnose", str(run)], ["diagnose", str(run), "--json"]):
        code, out, err = answer(capsys, *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "resolved.json" in err


@pytest.mark.parametrize("content", CONTENTS)
def test_without_its_summary_a_run_is_diagnosed_and_not_exported(run, capsys, content):
    (run / "summary.json").write_text(content)
    code, out, _ = answer(capsys, "diagnose", str(run))
    assert code == 0
    assert ("summary.json is damaged" in out) == (content != CONTENTS[-1])
    code, out, err = answer(capsys, "export", str(run), "--for", "hub", "--to", "me/model")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_damaged_line_of_metrics_is_named_by_the_diagnosis(run, capsys):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff\xfe\n" + b"".join(lines[1:]))
    code, _, err = answer(capsys, "diagnose", str(run))
    assert (code, err.count("\n")) == (2, 1)
    assert "metrics.jsonl is damaged: line 2" in err


def test_without_a_tokenizer_tokens_are_ids(run, capsys):
    (run / "latest" / "tokenizer.json").write_text("{")
    code, out, _ = answer(capsys, "show", str(run), "--rollout", ROLLOUT)
    assert (code, "tokens are shown as ids" in out) == (0, True)
