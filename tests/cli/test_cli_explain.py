"""`sharpen explain`: no null where a preset or a rule decides, for every algorithm; what it looks like."""

from __future__ import annotations

import io
import json
import re

import pytest

from sharpen.cli.explain import explain
from sharpen.config.load import resolve
from sharpen.learning.algorithm.advantages import ADVANTAGES
from sharpen.learning.algorithm.losses import POLICY_LOSSES
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.algorithm.supervised import SUPERVISED
from sharpen.learning.recipe import algorithm_of

BASE = {
    "train_dataset": {"path": "tasks.jsonl"},
    "model": {"model_path": "m", "max_model_len": 4096, "max_tokens": 512},
}
NEEDS = {
    "mix": {"expert.dataset": {"path": "rows.jsonl"}},
    "mix_chord": {"expert.dataset": {"path": "rows.jsonl"}},
    "on_policy_distill": {"distill.teacher_path": "teacher"},
    "jsd": {"distill.teacher_path": "teacher"},
}
DECIDED = ("loss", "distill", "expert", "sync", "sampling.max_refill", "sampling.overlong_length", "sampling.max_stal")
"""Where a null is decided by somebody else."""


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def lines(name: str, **settings) -> dict[str, tuple[object, str]]:
    out = io.StringIO()
    given = {"algorithm.algorithm_type": name, **NEEDS.get(name, {}), **settings}
    explain(resolve(BASE, given), out)
    found = [re.fullmatch(r"(\S+) = (.*)  \[(.*)\]", line) for line in out.getvalue().splitlines()]
    return {match[1]: (json.loads(match[2]), match[3]) for match in found if match}


@pytest.mark.parametrize("name", [*PRESETS, *SUPERVISED])
def test_a_null_that_something_else_decides_says_what_acts_and_whence(name):
    """Red on the code before: `loss.kl = null  [default]` for all 31 algorithms."""
    shown = lines(name)
    silent = [key for key, found in shown.items() if key.startswith(DECIDED) and found == (None, "default")]
    assert [key for key in silent if not key.startswith("expert.dataset.")] == []  # a dataset's own are its own
    assert shown["name"] == (None, "Experiment-<time of the start>")
    assert shown["execution"] == ("local", "whether the section cluster is given")
    assert shown["engine.kv_cache_mb"][1].startswith("at the start")


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_shown_is_what_the_run_trains_with(name):
    """Every part of the algorithm, by asking the algorithm itself."""
    settings = {"algorithm.algorithm_type": name, **NEEDS.get(name, {})}
    algorithm = algorithm_of(resolve(BASE, settings).config)
    shown = lines(name)
    for part in ("advantage", "policy_loss", "kl", "kl_coef", "behaviour", "aggregation", "std_threshold"):
        assert shown[f"loss.{part}"][0] == getattr(algorithm, part), part
    assert shown["sampling.max_refill"][0] == algorithm.max_refill
    for arguments in (algorithm.advantage_args, algorithm.policy_loss_args):
        for key, value in arguments.items():
            found = [shown[where][0] for where in shown if where.startswith("loss.") and where.endswith(f"{key}")]
            assert value in found, key
    assert shown["loss.advantage"][0] in ADVANTAGES
    assert shown["loss.policy_loss"][0] in POLICY_LOSSES


def test_origins_name_the_preset_the_part_or_the_other_setting():
    shown = lines("gspo")
    assert shown["loss.clip_low"] == (3e-4, "preset gspo")
    assert shown["loss.kl_coef"] == (0.001, "preset gspo")
    assert shown["loss.behaviour"] == ("truncated", "a clip below 0.05")
    assert shown["loss.kl_horizon"] == (None, "kl_coef is constant")
    assert shown["expert.mu"] == (None, "no part of gspo")
    exchanged = lines("gspo", **{"loss.policy_loss": "ppo", "loss.kl": "none", "loss.behaviour": "masked"})
    assert exchanged["loss.policy_loss"] == ("ppo", "argument")
    assert exchanged["loss.clip_low"] == (0.2, "loss.policy_loss ppo")
    assert exchanged["loss.kl_coef"] == (0.0, "loss.kl none")
    assert exchanged["loss.behaviour_low"] == (0.5, "loss.behaviour masked")
    assert lines("dr_grpo")["loss.constant_length"] == (512, "model.max_tokens")
    assert lines("dpo")["loss.policy_loss_args.beta"] == (0.1, "preset dpo")
    assert lines("sft")["loss.clip_low"] == (None, "no part of sft")
    ahead = lines("grpo", **{"sync.style": "fully_async", "trainer.num_minibatches": 2})
    assert ahead["sync.max_staleness"] == (2, "sync.style, interval and offset, in updates")
    kept = lines("grpo", **{"eval_dataset.path": "x.jsonl", "sampling.replay_share": 0.5, "execution": "ray"})
    assert "eval_dataset" not in kept
    assert kept["sampling.max_staleness"] == (4, "four steps' updates, plus sync's")
    assert kept["execution"] == ("ray", "argument")


def test_the_formats_of_a_model_that_is_here_are_said(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("<tool_call>\n<function=f>\n<parameter=a>\n")
    out = io.StringIO()
    explain(resolve(BASE, {"model.model_path": str(tmp_path)}), out)
    assert 'model.tool_call_parser = "auto"  [default]' in out.getvalue()
    assert "tool calls qwen3_coder (found in the chat template)" in out.getvalue().splitlines()[-1]


def test_a_run_that_would_be_refused_is_still_explained():
    out = io.StringIO()
    explain(resolve(BASE, {"algorithm.algorithm_type": "grpo", "algorithm.group_size": 1}), out)
    assert "loss.kl = null  [default]" in out.getvalue()
    assert out.getvalue().splitlines()[-1].startswith("this run would be refused: group_size is 1")


def test_settings_that_only_an_evaluation_may_have_are_explained():
    """A greedy model, or a nucleus. Red when `recipe_of` refuses what a run that trains refuses: `sharpen eval` takes
    the same file, and no null would be resolved."""
    kept = lines("grpo", **{"model.temperature": 0.0, "model.top_p": 0.9})
    assert kept["model.temperature"] == (0.0, "argument")
    assert kept["loss.kl"][1] == "preset grpo"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    explain(resolve(BASE, {"algorithm.algorithm_type": "jsd", "distill.teacher_path": "teacher"}), out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert max(map(len, text.splitlines())) <= min(columns, 100)
    assert "preset jsd" in text
