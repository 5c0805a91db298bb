"""What people see: plain lines in a log, a live block on a terminal, the table and the last line."""

from __future__ import annotations

import io
import os
import pty
import re
import time
from pathlib import Path

import pytest

from sharpen.show.monitor.display import Display, StepReport, duration, metrics_line, own_names, scale, sparkline
from sharpen.show.monitor.statistics import Evaluation
from sharpen.show.monitor.table import comparison_lines
from sharpen.show.monitor.verdict import Verdict


class Terminal(io.StringIO):
    """A stream that says it is a UTF-8 terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def report(step: int, reward: float | None = 0.5, **more) -> StepReport:
    return StepReport(step=step, reward=reward, tokens_per_s=12345.6, seconds=2.0, **more)


def evaluation(share: float, tasks: int = 20, **further: Evaluation) -> Evaluation:
    rewards = {str(task): float(task < share * tasks) for task in range(tasks)}
    return Evaluation(greedy=rewards, sampled=rewards, further=further)


def test_a_log_gets_one_plain_line_for_each_step():
    stream = io.StringIO()
    display = Display(100, stream)
    display.message("512 tasks held out")
    display.evaluation("before, greedy", 0, 512)
    display.evaluation("before, greedy", 512, 512)
    display.rollouts(3, 128)
    display.step(report(1))
    display.step(report(2, None, note="every rollout of this step was excluded"))
    display.close()
    assert stream.getvalue().splitlines() == [
        "512 tasks held out",
        "evaluated before, greedy: 512 tasks in 0.0s",
        "step   1/100  reward  0.500  2.00 s  left 3:18",
        "step   2/100  reward   none  2.00 s  left 3:16",
        "  step 2: every rollout of this step was excluded",
    ]


def test_the_table_fits_a_log_and_holds_every_number():
    stream = io.StringIO()
    display = Display(10, stream)
    display.table(evaluation(0.25, hard=evaluation(0.0, 10)), evaluation(0.75, hard=evaluation(0.5, 10)))
    text = stream.getvalue()
    assert "held-out (20 tasks)" in text
    assert "hard (10 tasks)" in text
    assert "greedy accuracy      0.250 [0.112, 0.469]  0.750 [0.531, 0.888]  +0.500 [+0.223, +0.675]" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert all(letter.isprintable() or letter == "\n" for letter in text)


METRICS = {"judge/right": 0.5234, "judge/format": 1.0, "workflow/seconds": 123.456, "workflow/characters": 12345.6}


def test_a_step_is_one_line_with_the_owners_metrics_that_fits():
    """Red where they stand on a line of their own, or only in a file."""
    stream = io.StringIO()
    Display(100, stream).step(report(1, metrics=METRICS, flat="3/16", certified=True))
    many = {f"judge/part of the reward number {n}": n / 7 for n in range(9)}
    Display(100, stream).step(report(2, metrics=many, certified=False))
    few, cut = stream.getvalue().splitlines()
    assert few == "step   1/100  reward  0.500  right 0.523  format 1.000  (+2)  flat 3/16  2.00 s  left 3:18"
    assert "part of ..number 0 0.000" in cut
    assert "(+8)" in cut
    assert cut.endswith("2.00 s  left 3:16  NOT CERTIFIED")
    assert max(map(len, (few, cut))) <= 100
    assert metrics_line({"judge/" + "x" * 200: 1.0}, 40) == "judge/xxx..xxxxxxxxx 1.000"
    assert metrics_line(many, 8) == "(9 metrics)"
    assert list(own_names({"judge/right": 1.0, "workflow/right": 2.0, "judge/a": 3.0})) == [
        "judge/right",
        "workflow/right",
        "a",
    ]


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_a_terminals_lines_fit_it(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    display = Display(10, stream)
    display.step(report(1, metrics=METRICS, flat="3/16", certified=True))
    display.evaluated(1, evaluation(0.75), evaluation(0.25))
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert max(len(line) for line in text.replace("\r", "\n").splitlines()) < columns
    assert ("characters 12,346" in text) == (columns == 160)


def with_metrics(share: float, **more: dict[str, float]) -> Evaluation:
    found = evaluation(share)
    right = dict(found.sampled)
    long = {task: 900.0 + 10 * int(task) + 400 * share for task in right}
    by_name = {"judge/right": right, "workflow/characters": long, **more}
    return Evaluation(greedy=found.greedy, sampled=found.sampled, metrics={"greedy": by_name, "sampled": by_name})


def test_the_table_has_what_workflow_and_judge_measured_with_paired_intervals():
    """Red on the code before: a metric was in `metrics.jsonl` alone, and of evaluations nowhere."""
    few = {"0": 1.0, "1": 0.0}
    stream = io.StringIO()
    Display(1, stream).table(with_metrics(0.25, rare=few), with_metrics(0.75, rare=few))
    lines = stream.getvalue().splitlines()
    assert lines[1:8] == [
        "held-out (20 tasks)    before                after                 difference",
        "-" * 90,
        "greedy accuracy        0.250 [0.112, 0.469]  0.750 [0.531, 0.888]  +0.500 [+0.223, +0.675]",
        "  judge/right          0.250 [0.112, 0.469]  0.750 [0.531, 0.888]  +0.500 [+0.223, +0.675]",
        "  workflow/characters  1,095 [1,067, 1,123]  1,295 [1,267, 1,323]  +200 [on every task]",
        "  rare (2)             0.500 [0.095, 0.905]  0.500 [0.095, 0.905]  0.000 [-0.573, +0.573]",
        "sampled accuracy       0.250 [0.112, 0.469]  0.750 [0.531, 0.888]  +0.500 [+0.223, +0.675]",
    ]
    assert max(map(len, lines)) <= 100


def test_a_narrow_table_is_stacked_and_loses_no_number():
    lines = comparison_lines(evaluation(0.25), evaluation(0.75), width=60)
    assert max(map(len, lines)) < 60
    assert lines[2:6] == [
        "greedy accuracy",
        "    before      0.250 [0.112, 0.469]",
        "    after       0.750 [0.531, 0.888]",
        "    difference  +0.500 [+0.223, +0.675]",
    ]


def test_an_evaluation_is_one_line_with_its_result_and_the_change():
    stream = io.StringIO()
    display = Display(10, stream)
    display.evaluated(0, evaluation(0.25), None)
    display.evaluated(8, evaluation(0.75, hard=evaluation(0.5, 10)), evaluation(0.25, hard=evaluation(0.0, 10)))
    assert stream.getvalue().splitlines() == [
        "held-out @0  greedy 0.250 [0.112, 0.469]  sampled 0.250 [0.112, 0.469]",
        "held-out @8  greedy 0.750 [0.531, 0.888]  +0.500  sampled 0.750 [0.531, 0.888]  +0.500",
        "hard @8  greedy 0.500 [0.237, 0.763]  +0.500  sampled 0.500 [0.237, 0.763]  +0.500",
    ]


def test_a_table_of_many_long_names_fits_and_says_how_many_there_are():
    many = {f"judge/a rather long name of a part, number {n}": {"0": 1.0, "1": 0.0} for n in range(20)}
    stream = io.StringIO()
    Display(1, stream).table(with_metrics(0.25, **many), with_metrics(0.75, **many))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "  and 10 more" in lines


def test_rewards_that_are_not_zero_or_one_are_called_rewards():
    stream = io.StringIO()
    one = Evaluation(greedy={"a": 0.5, "b": 0.7}, sampled={})
    Display(1, stream).table(one, one)
    assert "greedy reward" in stream.getvalue()
    assert "accuracy" not in stream.getvalue()


def test_what_is_an_accuracy_is_decided_by_all_evaluations_of_the_run():
    """Red where each mode, dataset and cell decides for itself: `greedy accuracy 1.500 [-4.853, 7.853]`, or
    Wilson's interval of the one model beside Student's of the other. By hand: 1.5 -+ 12.706 * 0.7071 / sqrt(2)."""
    few = {"a": 0.0, "b": 0.0}
    before = Evaluation(greedy=few, sampled=few, further={"hard": Evaluation(greedy=few, sampled=few)})
    after = Evaluation(greedy=few, sampled=few, further={"hard": Evaluation(greedy={"a": 1.0, "b": 2.0}, sampled=few)})
    rows = [line.split() for line in comparison_lines(before, after) if "greedy" in line or "sampled" in line]
    assert [row[1] for row in rows] == ["reward"] * 4
    assert " ".join(rows[0][2:5]) == "0.000 [on every"
    assert " ".join(rows[2][6:9]) == "1.500 [-4.853, 7.853]"
    shares = Evaluation(greedy=few, sampled=few, metrics={"greedy": {"judge/turns": few}})
    counts = Evaluation(greedy=few, sampled=few, metrics={"greedy": {"judge/turns": {"a": 3.0, "b": 3.0}}})
    (turns,) = [line for line in comparison_lines(shares, counts) if "judge/turns" in line]
    assert turns.split()[1:4] == ["0.000", "[0.000,", "1.973]"]  # 3 times Wilson's of 0 of 2: z^2 / (2 + z^2)


def test_an_evaluation_takes_as_long_as_from_its_start():
    """Red where the clock starts with the first task that has ended: four tasks took 0.0s."""
    stream = io.StringIO()
    display = Display(2, stream)
    display.evaluation("before (greedy)", 0, 1)
    time.sleep(0.3)
    display.evaluation("before (greedy)", 1, 1)
    (seconds,) = re.findall(r"1 tasks in ([0-9.]+)s", stream.getvalue())
    assert float(seconds) >= 0.3


def test_the_last_line_is_the_run_directory_plain_and_unwrapped_also_on_a_terminal(tmp_path: Path):
    run_dir = tmp_path / ("long" * 40)
    for stream in (io.StringIO(), Terminal()):
        display = Display(1, stream)
        display.step(report(1))
        verdict = Verdict(kind="better", model=str(run_dir / "best"), original=False, text="better by +0.300")
        display.usage(
            run_dir, verdict, run_dir / "reward_curve.png", tensorboard=True, options=" --tool-call-parser a_parser"
        )
        text = stream.getvalue()
        end = f"\nverdict: better by +0.300\nuse:     {run_dir / 'best'}\nrun directory: {run_dir}\n"
        assert text.endswith(end)
        assert f'AutoModelForCausalLM.from_pretrained("{run_dir / "best"}")' in text
        assert f"vllm serve {run_dir / 'best'} --tool-call-parser a_parser\n" in text.replace(" \\\n    ", " ")
        assert f"tensorboard --logdir {run_dir}/monitor/tensorboard" in text


def test_what_is_offered_follows_the_verdict():
    """Red on the code before: the last checkpoint was offered, however bad."""
    stream = io.StringIO()
    verdict = Verdict(kind="worse", model="org/base", original=True, text="worse by 0.240. Keep the original")
    Display(1, stream).usage(Path("run"), verdict, None, tensorboard=False, options="")
    text = stream.getvalue()
    assert 'from_pretrained("org/base")' in text
    assert "vllm serve org/base\n" in text  # no option
    assert "global_step" not in text
    assert "use:     org/base (the original model)\nrun directory: run\n" in text


def test_a_terminal_gets_a_live_block_and_messages_above_it():
    stream = Terminal()
    display = Display(10, stream)
    display.rollouts(3, 8)
    display.step(report(1, 0.25))
    display.message("[a message in brackets]")
    display.evaluation("greedy", 5, 10)
    display.step(report(2, 0.75, note="2 excluded"))
    display.close()
    display.close()
    text = stream.getvalue()
    assert "step 2/10" in text
    assert "0.750" in text
    assert "[a message in brackets]" in text
    assert "2 excluded" in text
    assert "\x1b[" in text


def test_a_terminal_without_the_bars_letters_gets_plain_lines():
    stream = Terminal()
    stream.encoding = "cp1252"
    display = Display(10, stream)
    display.step(report(1))
    assert stream.getvalue().startswith("step  1/10  reward  0.500")


def test_sparkline_and_durations():
    assert sparkline([0.0, 0.5, 1.0], 24, 0, 1) == "▁▅█"
    assert sparkline([0.3, 0.3], 24, 0, 1) == "▃▃", "the scale is fixed: a curve that stays low looks low"
    assert sparkline([0, 0, 1, 1], 2, 0, 1) == "▁█"
    assert sparkline([], 24, 0, 1) == ""
    assert scale([0.2, 0.4]) == (0.0, 1.0)
    assert scale([-3.0, 0.4]) == (-3.0, 1.0)
    assert scale([]) == (0.0, 1.0)
    assert [duration(seconds) for seconds in (0, 9.96, 59.7, 187, 7387)] == ["0.0s", "10.0s", "1:00", "3:07", "2:03:07"]


def test_a_pipe_that_nobody_reads_costs_the_display_alone():
    """Red when the error of a write goes on up: `sharpen run | head` ended the run."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        display = Display(10, stream)
        os.close(reading)
        for step in range(3):
            display.step(report(step))
        display.table(evaluation(0.25), evaluation(0.75))
        display.run_directory(Path("/runs/one"))
        print("what a workflow prints goes nowhere, too", file=stream, flush=True)


def test_a_terminal_that_is_closed_costs_the_display_alone(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        display = Display(10, stream)
        os.close(ours)
        for step in range(3):
            display.step(report(step, note="a remark"))
        display.close()
        display.message("more")


def test_what_a_stream_cannot_encode_is_escaped():
    raw = io.BytesIO()
    display = Display(1, io.TextIOWrapper(raw, encoding="ascii"))
    display.message("caf\u00e9")
    display.message("more")
    assert raw.getvalue().decode().splitlines() == ["caf\\xe9", "more"]
