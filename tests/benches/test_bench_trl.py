"""`make bench-trl` without TRL: statistics over runs, the table, the picture, and the judge of both sides' models."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
MODULES = ("agent", "plain", "report", "compare", "evaluate", "ours", "picture", "runs")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "quickstart"))
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "trl"))
    import compare
    import evaluate
    import ours
    import picture
    import runs

    yield SimpleNamespace(compare=compare, evaluate=evaluate, ours=ours, picture=picture, runs=runs)
    for name in MODULES:
        del sys.modules[name]


def make_run(bench, side, *, step_s, rewards=(0.25, 0.5, 0.75), process_s=100.0, peak_memory_mb=1000.0):
    steps = [
        bench.runs.Step(reward=reward, end_s=step_s * (index + 1), trained_tokens=100 * (index + 1))
        for index, reward in enumerate(rewards)
    ]
    return bench.runs.Run(side=side, seed=0, steps=tuple(steps), process_s=process_s, peak_memory_mb=peak_memory_mb)


def test_a_difference_by_hand(bench):
    """Means 0.9 and 0.7, variances 0.01 each: error sqrt(0.02 / 3) = 0.081650, times t(2) = 4.302653 is 0.351311."""
    found = bench.runs.difference([0.9, 0.8, 1.0], [0.6, 0.7, 0.8])
    assert found.difference == pytest.approx(0.2)
    assert found.low == pytest.approx(0.2 - 0.351311, abs=1e-6)
    assert found.high == pytest.approx(0.2 + 0.351311, abs=1e-6)


def test_one_seed_says_nothing_about_the_spread(bench):
    found = bench.runs.difference([0.9], [0.6])
    assert (found.difference, found.low, found.high) == (pytest.approx(0.3), -math.inf, math.inf)
    assert str(found) == "+30.0"


def test_what_a_run_says_of_itself(bench):
    run = make_run(bench, "trl", step_s=10.0)
    assert run.step_s == [10.0, 10.0, 10.0]
    assert run.train_s == 30.0
    assert run.trained_tokens == 600
    # the step that it was in counts as made: in favour of the side whose steps are counted
    assert [run.steps_at(seconds) for seconds in (1.0, 10.0, 15.0, 29.0, 31.0)] == [1, 1, 2, 3, 3]


def test_bands_and_smoothing_by_hand(bench):
    assert bench.runs.band([[1.0, 4.0], [2.0, 0.0], [6.0, 2.0]]) == ([1.0, 0.0], [3.0, 2.0], [6.0, 4.0])
    assert bench.runs.smoothed([0.0, 3.0, 6.0, 3.0], reach=1) == [1.5, 3.0, 4.0, 4.5]


def test_a_run_and_its_rewards_survive_the_disk(bench, tmp_path):
    steps = make_run(bench, "sharpen", step_s=2.0).steps
    bench.runs.write_run(tmp_path, side="sharpen", seed=3, steps=steps)
    run = bench.runs.read_run(tmp_path)
    assert (run.side, run.seed, run.steps) == ("sharpen", 3, steps)
    assert run.peak_memory_mb > 10
    assert run.process_s > 0
    held = bench.runs.Held(greedy=(1.0, 0.0), sampled=(0.5, 0.75))
    bench.runs.write_held(tmp_path / "held_out.json", held)
    assert bench.runs.read_held(tmp_path / "held_out.json") == held
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "held_out.json"}


def make_pair(bench, ours, theirs, quarter):
    def held(share):
        return bench.runs.Held(greedy=(share, share), sampled=(share, share))

    def moment(our_steps, trl_steps, trl):
        return bench.compare.Moment(our_steps=our_steps, trl_steps=trl_steps, ours=held(ours), trl=held(trl))

    return bench.compare.Pair(
        trl=make_run(bench, "trl", step_s=6.0),
        ours=make_run(bench, "sharpen", step_s=1.5, process_s=50.0, peak_memory_mb=500.0),
        trl_held=held(theirs),
        quarter=moment(1, 1, quarter),
        end=moment(3, 2, theirs),
    )


def test_the_table_and_what_is_judged(bench):
    """Ours 0.9 and 0.8 against 0.9 and 0.9, then 0.5 and 0.4: differences -0.05 and 0.4, errors 0.05 and 0.0707."""
    pairs = [make_pair(bench, 0.9, 0.9, 0.5), make_pair(bench, 0.8, 0.9, 0.4)]
    before = bench.runs.Held(greedy=(0.0, 0.5), sampled=(0.5, 0.25))
    rows, ratios = bench.compare.make_rows(pairs, before)
    assert rows[0] == ("median step, s", "6.00", "1.50", "4.00 x")
    assert ("peak memory, MB", "1000 (1000-1000)", "500 (500-500)", "2.00 x") in rows
    assert ("greedy %, before", "25.0", "25.0", "") in rows
    assert ("steps in time of our 3", "2 (2-2)", "3", "") in rows
    assert (ratios["step"], ratios["process"], ratios["trained_tokens"]) == (4.0, 2.0, 1.0)
    assert ratios["greedy_equal_steps_high"] == pytest.approx(-0.05 + 12.706205 * 0.05)
    assert ratios["sampled_quarter_low"] == pytest.approx(0.4 - 12.706205 * math.sqrt(0.005))
    assert ratios["sampled_end_high"] == ratios["sampled_equal_steps_high"]
    assert bench.compare.markdown(("a", "b"), [("c", "d")]) == "| a | b |\n|---|---|\n| c | d |"
    one, ratios_of_one = bench.compare.make_rows(pairs[:1], before)
    assert ("sampled %, time of our 1 steps", "50.0", "90.0", "+40.0") in one
    assert not [name for name in ratios_of_one if name.endswith(("_high", "_low"))]


def test_the_picture_is_drawn(bench, tmp_path):
    trl, ours = ([make_run(bench, side, step_s=step_s)] for side, step_s in (("trl", 6.0), ("sharpen", 1.5)))
    bench.picture.draw(trl, ours, tmp_path / "images" / "trl.png")
    assert (tmp_path / "images" / "trl.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [1, 3, 6, 7, 9, 11, 40])
def test_no_model_that_is_judged_was_pruned(bench, tmp_path, steps):
    """Red with four checkpoints kept: of 6 steps, whose quarter is one, the first was gone when it was asked for."""
    arguments = SimpleNamespace(out=tmp_path, seed=0, steps=steps)
    config = bench.ours.resolve_settings(arguments).config
    interval = config.algorithm.save_interval_steps
    saved = [step for step in range(1, steps + 1) if step % interval == 0 or step == steps]
    assert {bench.runs.quarter(steps), steps} <= set(saved[-config.trainer.keep_checkpoints :])


class ScriptedModel:
    """Uses the calculator and repeats its result; in every second sampled round, and for what was lost, guesses 0."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._rounds = 0

    def generate(self, input_ids, attention_mask, max_new_tokens, do_sample, **_):
        import torch

        texts = self._tokenizer.batch_decode(input_ids)
        self._rounds += do_sample and not any("<tool_response>\n" in text for text in texts)
        turns = [self._tokenizer.encode(self._reply(text, do_sample) + "<|im_end|>") for text in texts]
        width = max(map(len, turns))
        padded = [turn + [self._tokenizer.pad_token_id] * (width - len(turn)) for turn in turns]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    def _reply(self, text, do_sample):
        if "<tool_response>\n" in text:
            return "#### " + text.rpartition("<tool_response>\n")[2].partition("\n")[0]
        if "lost" in text or (do_sample and self._rounds % 2 == 0):
            return "#### 0"
        call = {"name": "calculator", "arguments": {"expression": "20 + 22"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_the_judge_runs_the_agent_and_counts(bench):
    """Greedy: one of two tasks. Sampled: the guess comes in one of three rounds.

    Seen red with `max(column)` for `sum(column) / samples` in `trl_evaluate.evaluate`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "quickstart" / "model")
    tasks = [
        {"question": "Mia has 20 coins. Tom gives 22 more. How many coins does Mia have now?", "answer": "#### 42"},
        {"question": "Mia lost 2 of the 9 coins in a bag. How many coins are left?", "answer": "#### 7"},
    ]
    held = bench.evaluate.evaluate(ScriptedModel(tokenizer), tokenizer, tasks, samples=3)
    assert held.greedy == (1.0, 0.0)
    assert held.sampled == (pytest.approx(2 / 3), 0.0)
    assert held.accuracy("greedy") == 0.5
