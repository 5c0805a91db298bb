"""The picture of a run: no line where nothing was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

from sharpen.show.monitor.curve import draw_reward_curve, with_gaps


def test_a_line_is_broken_where_steps_are_missing():
    xs, ys = with_gaps([1, 2, 5, 6], [0.1, 0.2, 0.5, 0.6])
    assert [x for x in xs if not math.isnan(x)] == [1, 2, 5, 6]
    assert [index for index, x in enumerate(xs) if math.isnan(x)] == [2]
    assert math.isnan(ys[2])


def test_a_curve_with_a_title_of_two_lines_is_drawn(tmp_path: Path):
    rows = [{"step": step, "reward/mean": 0.5} for step in (1, 2, 5)]
    rows.append({"step": 5, "eval/greedy/accuracy": 0.5, "eval/greedy/low": 0.4, "eval/greedy/high": 0.6})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    draw_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", title="run: model, grpo\nverdict: better")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
