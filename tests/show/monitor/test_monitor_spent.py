"""Where the time of a step went: the shares, and where people see them."""

import io

import pytest

from sharpen.show.monitor import spent
from sharpen.show.monitor.display import Display, StepReport


def step(seconds: float, *parts: float) -> dict[str, float]:
    return {"time/step_s": seconds, **dict(zip(spent.PARTS.values(), parts, strict=True))}


def test_shares_are_of_the_time_of_all_steps_together():
    found = spent.shares([step(2.0, 1.0, 0.5, 0.4, 0.1), step(6.0, 5.0, 0.0, 6.0, 0.1)])
    assert found == pytest.approx({"generating": 0.75, "waiting": 0.0625, "training": 0.8, "syncing": 0.025})
    assert list(found) == list(spent.PARTS)
    assert spent.line(found) == "generating 75%, waiting 6%, training 80%, syncing 2%"


def test_a_run_that_did_not_measure_them_has_none():
    assert spent.shares([{"time/step_s": 2.0, "time/train_s": 1.0}]) == {}
    assert spent.shares([]) == {}


def report(number: int, *parts: float) -> StepReport:
    shares = spent.shares([step(1.0, *parts)]) if parts else {}
    return StepReport(step=number, reward=0.5, tokens_per_s=12345.0, seconds=2.0, flat="128/128", spent=shares)


def test_a_log_tells_it_with_the_first_step_and_at_most_every_ten_when_it_has_changed():
    stream = io.StringIO()
    display = Display(14, stream)
    display.step(report(1, 0.6, 0.1, 0.25, 0.05))
    display.step(report(2, 0.1, 0.6, 0.25, 0.05))
    display.step(report(10, 0.1, 0.6, 0.25, 0.05))
    display.step(report(11, 0.55, 0.1, 0.3, 0.05))
    display.step(report(12, 0.5, 0.1, 0.36, 0.04))
    display.step(report(13, 0.1, 0.6, 0.25, 0.05))
    display.step(report(14))
    lines = [line for line in stream.getvalue().splitlines() if "time" in line]
    assert lines == [
        "  time: generating 60%, waiting 10%, training 25%, syncing 5%; 12,345 tokens/s",
        "  time: generating 50%, waiting 10%, training 36%, syncing 4%; 12,345 tokens/s",
    ]


@pytest.mark.parametrize("parts", [(0.6, 0.1, 0.25, 0.05), (1.0, 0.0, 1.0, 0.01)])
def test_the_live_block_shows_them_and_what_is_done_now_within_80_columns(parts):
    display = Display(40, io.StringIO())
    display.step(report(1, *parts))
    display.doing("training")
    display.rollouts(45, 128)
    lines = [line.plain for line in display._block_lines(80)]
    assert len(lines) == 5
    assert max(map(len, lines)) < 80
    assert lines[2].split("  ") == [f"{part} {share:.0%}" for part, share in zip(spent.PARTS, parts, strict=True)]
    assert "rollouts 45/128" in lines[3]
    assert "training 0.0s" in lines[4]
    display.doing("")
    display.close()


def test_many_steps_take_no_more_memory_than_one():
    """Red when the times of each step are kept until the end of the run."""
    total: dict[str, float] = {}
    steps = [step(2.0, 1.0, 0.5, 0.4, 0.1), step(6.0, 5.0, 0.0, 6.0, 0.1), {"time/step_s": 5.0}]
    for one in steps:
        total = spent.plus(total, {**one, "time/rollout_s": 1.0, "reward/mean": 0.5})
    assert spent.shares([total]) == spent.shares(steps)
    assert len(total) == 5
    assert spent.shares([{}]) == {}
