"""`sharpen show`: a rollout in a terminal and in a pipe."""

import argparse
import io
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from sharpen.agent.transcript import clean, pieces
from sharpen.cli.show import add_show, run_show
from sharpen.errors import ConfigError
from sharpen.learning.experience.draw import make_batch
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.records import Delivery, GroupPlace
from sharpen.types import Call, CallEntropies, CallStatus, Group, Outcome, Rollout, Sampling, Span, Task

ANSI = re.compile(r"\x1b\[[0-9;]*m")
QUESTION = {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2? " * 12}, {"type": "image_url"}]}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
SPAN = Span(trace_id="4bf92f3577b34da6a3ce929d0e0e4736", span_id="00f067aa0ba902b7")
USED = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": '{"e": "2+2"}'}}


TRACEBACK = "\n".join(["Traceback:", *(f"  in frame {number}" for number in range(20)), "KeyError: 'x' \x1b[31m"])


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def tokenizer(toy_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(toy_model_dir)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, toy_model_dir, tokenizer):
    """Two steps of one group each: a rollout of a tool call and an answer, one without loss, one that failed."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "resolved.json").write_text(json.dumps({"model.model_path": {"value": str(toy_model_dir)}}))
    with Journal(folder / "run.db") as journal:
        for step in (3, 13):
            group = make_group(step, tokenizer)
            journal.add(group)
            journal.add_step(step + 1, step + 1, {}, experiences(group))
    return folder


def experiences(group):
    from sharpen.learning.algorithm.presets import PRESETS

    return make_batch([group], PRESETS["grpo"]).experiences


def make_group(step, tokenizer):
    name = f"step-{step}/train/17"
    rollouts = (
        make_rollout(name, 0, 1.0, tokenizer),
        make_rollout(name, 1, 0.0, tokenizer, sampling=Sampling(temperature=0.0)),
        make_rollout(name, 2, None, tokenizer, outcome=Outcome.JUDGE_ERROR, error="KeyError: 'x' \x1b[31m in judge"),
    )
    rollouts = (*rollouts[:2], replace(rollouts[2], traceback=TRACEBACK, started=1.7e9))
    task = Task(id="train/17", index=17, row={"question": "2 + 2"})
    return Group(id=name, task=task, version=step, rollouts=rollouts)


def make_rollout(group, index, reward, tokenizer, *, sampling=None, outcome=Outcome.OK, error=None):
    sampling = sampling or Sampling()
    first = make_call(tokenizer, 0, None, "<tool_call>go</tool_call><|im_end|>", (QUESTION,), sampling, [USED])
    answer = {"role": "tool", "content": "4", "name": "calculator", "tool_call_id": "call_1"}
    messages = (QUESTION, {"role": "assistant", "content": None, "tool_calls": [USED]}, answer)
    second = make_call(tokenizer, 1, first, "The answer: \u00e9\x1b[2J 4\nyes<|im_end|>", messages, sampling, None)
    return Rollout(
        id=f"{group}/{index}",
        group_id=group,
        task_id="train/17",
        index=index,
        attempt=0,
        calls=(first, second),
        outcome=outcome,
        reward=reward,
        metrics={"steps": 2.0},
        step_rewards={1: 0.25},
        states={1: "hall"},
        error=error,
        seconds=1.5,
    )


def make_call(tokenizer, index, parent, text, messages, sampling, used):
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    prompt = np.array([1, 2, 3], np.int32)
    if parent is not None:
        prompt = np.concatenate([parent.prompt_ids_P, parent.sampled_ids_S, prompt])
    return Call(
        index=index,
        parent=None if parent is None else parent.index,
        prompt_ids_P=prompt,
        sampled_ids_S=ids,
        logprobs_S=np.linspace(-0.001, -6.0, len(ids)).astype(np.float32),
        versions_S=np.full(len(ids), 3, np.int32),
        sampling=sampling,
        finish_reason="stop",
        status=CallStatus.USED,
        messages=messages,
        tools=(TOOL,),
        response={"role": "assistant", "content": None if used else "4", **({"tool_calls": used} if used else {})},
        span=None if used else SPAN,
    )


def show(run_dir, *options, out=None):
    parser = argparse.ArgumentParser()
    add_show(parser)
    out = out or io.StringIO()
    assert run_show(parser.parse_args([str(run_dir), *options]), out) == 0
    return out.getvalue()


def test_without_a_rollout_the_last_groups_are_listed(run_dir):
    lines = show(run_dir).splitlines()
    assert lines[:2] == ["step-3/train/17   1 0 judge_error", "step-13/train/17  1 0 judge_error"]
    assert lines[-1] == f"read one:  sharpen show {run_dir} --rollout step-13/train/17/0"


def test_a_rollout_in_a_pipe_is_plain_text_of_at_most_100_columns(run_dir):
    text = show(run_dir, "--rollout", "step-3/train/17/0")
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    assert "outcome ok reward 1 calls 2" in words
    assert words.count("step reward 0.25, state hall") == 1  # of the second call
    assert "[image_url]" in words
    assert words.count("What is 2 + 2?") == 12, "the prompt of the second call repeats the first one's: shown once"
    assert "<tool_call>go</tool_call><|im_end|>" in words
    assert '-> calculator({"e": "2+2"})' in words
    assert words.count("calculator(") == 1
    assert "tool (calculator): 4 call 1:" in words
    assert "version 3" in words
    assert "trained, advantage +0.707" in words
    assert words.count(f"OpenTelemetry: trace {SPAN.trace_id}, span {SPAN.span_id}") == 1  # of the second call
    assert "The answer: \u00e9\\x1b[2J 4" in words


def test_in_a_terminal_tokens_are_coloured_by_their_probability(run_dir, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = show(run_dir, "--rollout", "step-3/train/17/0", out=Terminal())
    assert re.search(r"\x1b\[32m<", text), "the first token is likely: green"
    assert re.search(r"\x1b\[1;31m[^\x1b]*<\|im_end\|>", text), "the last one is not: bold red"
    assert "probability: 0.9 to 1" in ANSI.sub("", text)
    assert set(re.findall(r"\x1b[^m]*", text)) == set(re.findall(r"\x1b\[[0-9;]*", text)), "colours only"
    without_loss = show(run_dir, "--rollout", "step-3/train/17/1", out=Terminal())
    assert re.search(r"\x1b\[2;32m<", without_loss)
    assert "no loss (temperature 0)" in " ".join(ANSI.sub("", without_loss).split())


def test_a_table_of_tokens(run_dir, tokenizer):
    text = show(run_dir, "--rollout", "step-3/train/17/0", "--call", "1", "--tokens")
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith("   1")]
    ids = tokenizer("The answer: \u00e9\x1b[2J 4\nyes<|im_end|>", add_special_tokens=False)["input_ids"]
    assert [row[0] for row in rows] == [str(place) for place in range(len(ids))]
    assert [row[-4] for row in rows] == [str(token_id) for token_id in ids]
    assert [row[-2] for row in rows] == ["3"] * len(ids)
    assert rows[0][-3] == "-0.0010"
    assert "call 0:" not in text
    assert max(map(len, text.splitlines())) <= 100
    untrained = show(run_dir, "--rollout", "step-3/train/17/1", "--call", "1", "--tokens")
    assert len([line for line in untrained.splitlines() if line.rstrip().endswith("   0")]) == len(ids)


def test_the_table_has_entropies_and_ratios_where_they_are_recorded(tmp_path, run_dir, tokenizer):
    shutil.copytree(run_dir, tmp_path / "run")
    group = make_group(3, tokenizer)
    call = group.rollouts[0].calls[0]
    first, count = len(call.prompt_ids_P), len(call.sampled_ids_S)
    entropies = CallEntropies(
        rollout_id="step-3/train/17/0",
        call=0,
        places_S=np.arange(first, first + count - 1, dtype=np.int32),
        entropies_S=np.full(count - 1, 1.25, np.float16),
        log_ratios_S=np.log([1.5, 1e-5, *[1.0] * (count - 3)]).astype(np.float16),
        clipped_S=np.arange(count - 1) == 0,
        entropy=1.25 * (count - 1),
        varentropy=0.5 * (count - 1),
        cumulative=0.5 * (count - 1),
    )
    place = GroupPlace(group_id="step-3/train/17", update=0, left_out=None, replayed=False)
    with Journal(tmp_path / "run/run.db") as journal:
        delivery = Delivery(spans=(), places=(place,))
        journal.add_step(4, 4, {}, experiences(group), delivery, entropies=[entropies])
    text = show(tmp_path / "run", "--rollout", "step-3/train/17/0", "--tokens")
    assert (text.count("entropy"), text.count("ratio ")) == (2, 2)
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith("   1")]
    assert [row[-4] for row in rows[:count]] == ["1.250"] * (count - 1) + ["-"]
    assert [row[-3] for row in rows[:count]] == ["1.500*", "1e-05", *["1.000"] * (count - 3), "-"]
    assert {(row[-4], row[-3]) for row in rows[count:]} == {("-", "-")}
    assert text.count("*: clipped, without a gradient from the policy loss") == 1  # below the first call
    unchanged = show(run_dir, "--rollout", "step-3/train/17/0", "--tokens")
    assert "ratio" not in unchanged


def test_filters_choose_failures_the_best_a_step_and_a_task_and_print_what_was_said(run_dir):
    failed = show(run_dir, "--failed").splitlines()
    assert failed[0] == "step-3/train/17/2  judge_error  calls 2"
    assert failed[1] == "    KeyError: 'x' \\x1b[31m in judge"
    assert [line.split()[0] for line in failed if line.startswith("step-")] == [
        "step-3/train/17/2",
        "step-13/train/17/2",
    ]
    best = show(run_dir, "--best", "--step", "14", "--limit", "1").splitlines()
    assert best[:2] == ["step-13/train/17/0  reward 1  calls 2", "    4"]
    assert best[-1].endswith("--rollout step-13/train/17/0")
    assert show(run_dir, "--task", "train/17", "--failed") == show(run_dir, "--failed")
    assert show(run_dir, "--task", "17").count("reward ") == 4  # a training task, which was not evaluated
    with pytest.raises(ConfigError, match="of step 99 and failed"):
        show(run_dir, "--step", "99", "--failed")
    with pytest.raises(ConfigError, match="--rollout names one"):
        show(run_dir, "--rollout", "17/0", "--best")


def test_the_tasks_row_is_printed_and_all_of_it_comes_as_json(run_dir):
    assert "  question: 2 + 2" in show(run_dir, "--rollout", "step-3/train/17/0").splitlines()
    (one,) = json.loads(show(run_dir, "--best", "--limit", "1", "--json"))
    assert (one["reward"], one["task"], one["calls"][1]["response"]["content"]) == (1.0, {"question": "2 + 2"}, "4")
    assert [call["span"] for call in one["calls"]] == [None, {"trace_id": SPAN.trace_id, "span_id": SPAN.span_id}]
    rollout = json.loads(show(run_dir, "--rollout", "step-3/train/17/2", "--json"))
    assert (rollout["outcome"], rollout["reward"]) == ("judge_error", None)
    assert json.loads(show(run_dir, "--json"))["step-3/train/17"]["step-3/train/17/2"] is None


def test_a_failed_rollout_says_why(run_dir):
    text = show(run_dir, "--rollout", "step-13/train/17/2")
    assert "outcome judge_error" in text
    assert "reward none" in text
    assert "error: KeyError: 'x' \\x1b[31m in judge" in text
    assert "no loss (its rollout was not trained)" in text


def test_a_traceback_is_folded_and_whole_as_json(run_dir):
    """Red when `Page` prints none, or all of it, or passes control characters on."""
    lines = show(run_dir, "--rollout", "step-3/train/17/2").splitlines()
    first = next(number for number, line in enumerate(lines) if "10 more lines" in line)
    assert "--json" in lines[first]
    assert lines[first + 1].strip() == "in frame 9"
    assert lines[first + 12].strip() == "KeyError: 'x' \\x1b[31m"
    found = json.loads(show(run_dir, "--rollout", "step-3/train/17/2", "--json"))
    assert (found["traceback"], found["started"]) == (TRACEBACK, 1.7e9)


def test_ids_may_be_shortened_as_far_as_they_are_unique(run_dir):
    whole = show(run_dir, "--rollout", "step-13/train/17/2")
    assert show(run_dir, "--rollout", "step-13/train/17/2") == whole
    with pytest.raises(ConfigError, match=r"2 rollouts match '17/2', e\.g\. step-13/train/17/2, step-3/train/17/2"):
        show(run_dir, "--rollout", "17/2")
    with pytest.raises(ConfigError, match="3 rollouts match 'step-13'"):
        show(run_dir, "--rollout", "step-13")
    with pytest.raises(ConfigError, match="no rollout's id equals, ends or begins with 'nope'"):
        show(run_dir, "--rollout", "nope")
    with pytest.raises(ConfigError, match="ids that contain it: step-3/train/17/0"):
        show(run_dir, "--rollout", "rain/17")


def test_wrong_options_are_told(run_dir, tmp_path):
    with pytest.raises(ConfigError, match="has 2 calls, from 0"):
        show(run_dir, "--rollout", "step-3/train/17/0", "--call", "2")
    with pytest.raises(ConfigError, match="belong to --rollout"):
        show(run_dir, "--tokens")
    with pytest.raises(ConfigError, match=r"no run\.db"):
        show(tmp_path)


def test_without_a_tokenizer_ids_are_shown_and_said_so(run_dir, tmp_path):
    import shutil

    shutil.copy(run_dir / "run.db", tmp_path / "run.db")
    (tmp_path / "resolved.json").write_text(json.dumps({"model.model_path": {"value": "/nowhere/at all"}}))
    text = show(tmp_path, "--rollout", "step-3/train/17/0")
    assert text.startswith("tokens are shown as ids: model_path '/nowhere/at all' does not exist")
    assert re.search(r"<\d+><\d+>", text)


def test_a_character_of_several_tokens_is_one_piece(tokenizer):
    ids = np.array(tokenizer("a\u00e9\u20acb", add_special_tokens=False)["input_ids"], np.int32)
    assert len(ids) == 7
    found = list(pieces(ids, tokenizer.decode))
    assert [text for _, _, text in found] == ["a", "\u00e9", "\u20ac", "b"]
    assert [(start, end) for start, end, _ in found] == [(0, 1), (1, 3), (3, 6), (6, 7)]


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer):
    ids = np.array(tokenizer("a\u20ac", add_special_tokens=False)["input_ids"], np.int32)[:2]
    assert [text for _, _, text in pieces(ids, tokenizer.decode)] == ["a", "\ufffd"]


def test_control_characters_are_written_out():
    assert clean("a\x1b[2J\tb\nc\x07\x9b") == "a\\x1b[2J\tb\nc\\x07\\x9b"
