"""The services that show metrics: W&B, MLflow, SwanLab, Trackio.

In: a step with its numbers, and rollouts as rows of a table. Out: the service's run. Each continues its run when ours
is resumed, under the same identity. What it had of steps that are trained again is there twice: none of them takes
anything back. Their errors are `metrics.TolerantSink`'s to catch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from sharpen.contracts import MonitoredRun, Rows, Sink
from sharpen.files import write_whole

TABLE = "rollouts"
_STEPS_A_FILE = 100
"""MLflow appends to a table by writing its whole file again, and has room for the names of about a hundred files."""


class WandbSink:
    """Weights & Biases; `module` is the imported `wandb`. A run of the same project and name is continued."""

    def __init__(self, module: Any, run: MonitoredRun) -> None:
        self._module = module
        self._run = module.init(
            project=run.project,
            name=run.name,
            id=_identity(f"{run.project}-{run.name}"),
            resume="allow",
            dir=str(run.run_dir / "monitor"),
            config=dict(run.settings),
        )
        # with a step metric of its own, a resumed run can log steps that W&B has already seen
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers with their step."""
        self._run.log({**metrics, "step": step})

    def rollouts(self, step: int, rows: Rows) -> None:
        """Log a table of this step."""
        columns, data = _columns(rows), [list(row.values()) for row in rows]
        self._run.log({TABLE: self._module.Table(columns=columns, data=data), "step": step})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class MlflowSink:
    """MLflow; `module` is the imported `mlflow`. The run's id is kept in the run directory for a resume."""

    def __init__(self, module: Any, run: MonitoredRun) -> None:
        self._module = module
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # else each table draws bars
        id_file = run.run_dir / "monitor" / "mlflow_run_id"
        module.set_experiment(run.project)
        if id_file.exists():
            module.start_run(run_id=id_file.read_text(encoding="utf-8").strip())
        else:
            started = module.start_run(run_name=run.name)
            write_whole(id_file, f"{started.info.run_id}\n")
            module.log_params(dict(run.settings))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers with their step."""
        self._module.log_metrics(dict(metrics), step=step)

    def rollouts(self, step: int, rows: Rows) -> None:
        """Append to the table of a hundred steps."""
        first = (step - 1) // _STEPS_A_FILE * _STEPS_A_FILE + 1
        file = f"{TABLE}/steps-{first:06d}-{first + _STEPS_A_FILE - 1:06d}.json"
        data = {"step": [step] * len(rows), **{name: [row[name] for row in rows] for name in _columns(rows)}}
        self._module.log_table(data=data, artifact_file=file)

    def close(self) -> None:
        """End the run."""
        self._module.end_run()


class SwanlabSink:
    """SwanLab; `module` is the imported `swanlab`. A run of the same project and name is continued where SwanLab keeps
    it in the cloud."""

    def __init__(self, module: Any, run: MonitoredRun) -> None:
        self._module = module
        self._run = module.init(
            project=_identity(run.project),
            name=run.name,
            id=_identity(f"{run.project}-{run.name}"),
            resume="allow",
            log_dir=str(run.run_dir / "monitor" / "swanlab"),
            config=dict(run.settings),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers with their step."""
        self._run.log(dict(metrics), step=step)

    def rollouts(self, step: int, rows: Rows) -> None:
        """Log a table of this step."""
        table = self._module.echarts.Table()
        table.add(_columns(rows), [list(row.values()) for row in rows])
        self._run.log({TABLE: table}, step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class TrackioSink:
    """Trackio; `module` is the imported `trackio`. A run of the same project and name is continued: its steps after
    the checkpoint are logged a second time."""

    def __init__(self, module: Any, run: MonitoredRun) -> None:
        self._module = module
        self._run = module.init(
            project=run.project, name=run.name, resume="allow", config=dict(run.settings), embed=False
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers with their step."""
        self._run.log(dict(metrics), step=step)

    def rollouts(self, step: int, rows: Rows) -> None:
        """Log a table of this step."""
        self._run.log({TABLE: self._module.Table(data=[dict(row) for row in rows])}, step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


def _identity(name: str) -> str:
    """The name with the letters that services take in identities."""
    return "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "-_" else "-" for letter in name)


def _columns(rows: Rows) -> list[str]:
    return list(rows[0])


SERVICES: Mapping[str, tuple[str, Callable[[Any, MonitoredRun], Sink]]] = {
    "wandb": ("W&B", WandbSink),
    "mlflow": ("MLflow", MlflowSink),
    "swanlab": ("SwanLab", SwanlabSink),
    "trackio": ("Trackio", TrackioSink),
}
"""Each monitor type that is a package of this name, with its title and its sink."""
