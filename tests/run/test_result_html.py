"""A result in a notebook."""

from __future__ import annotations

from pathlib import Path

from sharpen.run.result import TuneResult
from sharpen.show.monitor.statistics import accuracy
from sharpen.show.monitor.verdict import Verdict


def test_a_result_is_shown_with_verdict_table_and_curve(tmp_path: Path):
    (tmp_path / "reward_curve.png").write_bytes(b"a picture")
    result = TuneResult(
        run_dir=tmp_path,
        model_dir=tmp_path / "global_step_2",
        best_model_dir=tmp_path / "global_step_2",
        before={"sampled": accuracy([0.0, 0.0, 1.0, 0.0])},
        after={"sampled": accuracy([1.0, 1.0, 1.0, 0.0])},
        rewards_before=None,
        rewards_after=None,
        steps=2,
        verdict=Verdict(kind="better", model="a <model> & more", original=False, text="better by <b>0.5</b>"),
    )
    html = result._repr_html_()
    assert "better by &lt;b&gt;0.5&lt;/b&gt;" in html
    assert "a &lt;model&gt; &amp; more" in html
    assert "<td>0.250 [" in html
    assert "<td>0.750 [" in html
    assert "data:image/png;base64,YSBwaWN0dXJl" in html
    assert "loss" not in html
