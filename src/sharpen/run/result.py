"""The result of `tune()`."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from sharpen.show.monitor.figures import with_interval
from sharpen.show.monitor.statistics import Accuracy, Evaluation
from sharpen.show.monitor.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of a run.

    `verdict` says whether the run made the model better and which model to use: a checkpoint, or the original.
    `model_dir` is the checkpoint of the last step, a Hugging Face directory. `best_model_dir` is the model that
    evaluated best, possibly by luck: a checkpoint, the original if it was better than every checkpoint, or the last
    step if nothing was evaluated. `before` and `after` map each mode (`greedy`, `sampled`) to the accuracy on held-out
    tasks with its 95% interval; `rewards_before` and `rewards_after` hold the reward of every task; `loss_before` and
    `loss_after` hold the loss on held-out rows, in a run without rollouts. Without an evaluation they are empty or
    None.
    """

    run_dir: Path
    model_dir: Path
    best_model_dir: Path
    before: Mapping[str, Accuracy]
    after: Mapping[str, Accuracy]
    rewards_before: Evaluation | None
    rewards_after: Evaluation | None
    steps: int
    verdict: Verdict
    loss_before: float | None = None
    loss_after: float | None = None

    def _repr_html_(self) -> str:
        """As a notebook shows it: the verdict, the results before and after, the curve, where the files are."""
        rows = [
            f"<tr><td>{mode}</td><td>{escape(with_interval(self.before[mode]))}</td>"
            f"<td>{escape(with_interval(after))}</td></tr>"
            for mode, after in self.after.items()
            if mode in self.before
        ]
        if self.loss_before is not None and self.loss_after is not None:
            rows.append(f"<tr><td>loss</td><td>{self.loss_before:.4f}</td><td>{self.loss_after:.4f}</td></tr>")
        table = "<table><tr><th>held-out</th><th>before</th><th>after</th></tr>" + "".join(rows) + "</table>"
        return "".join(
            [
                f"<p><b>{escape(self.verdict.text)}</b></p>",
                f"<p>use: <code>{escape(self.verdict.model)}</code></p>",
                table if rows else "",
                *(map(_image, (self.run_dir / "reward_curve.png", self.run_dir / "loss_curve.png"))),
                f"<p>{self.steps} steps, run directory: <code>{escape(str(self.run_dir))}</code></p>",
            ]
        )


def _image(path: Path) -> str:
    """Return the picture as part of the page, so that a saved notebook keeps it; nothing if it was not drawn."""
    if not path.is_file():
        return ""
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(path.stem.replace("_", " "))}" width="640" src="data:image/png;base64,{content}">'
