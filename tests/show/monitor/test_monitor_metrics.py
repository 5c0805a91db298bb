"""Where metrics go: metrics.jsonl, TensorBoard, and stand-ins of W&B and MLflow."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sharpen.config.extras import install_command
from sharpen.config.public import MONITORS
from sharpen.contracts import MonitoredRun
from sharpen.errors import ConfigError, JournalError
from sharpen.show.monitor.metrics import OURS, JsonlSink, Monitor, TolerantSink, monitor_of, open_monitor
from sharpen.show.monitor.services import SERVICES, MlflowSink, SwanlabSink, TrackioSink, WandbSink
from sharpen.show.monitor.tensorboard import TensorBoardSink
from sharpen.testing import check_monitor


def run_in(folder: Path, project: str = "p", name: str = "n", **settings: Any) -> MonitoredRun:
    return MonitoredRun(run_dir=folder, project=project, name=name, settings=settings)


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_is_on_disk_when_log_returns(tmp_path: Path):
    monitor = open_monitor(run_in(tmp_path), "tensorboard", print)
    monitor.log(1, {"reward/mean": 0.5, "loss/policy": math.nan})
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert row.pop("time") > 0
    assert row == {"step": 1, "reward/mean": 0.5, "loss/policy": None}
    assert len(list((tmp_path / "monitor" / "tensorboard").iterdir())) == 1
    monitor.close()


def test_a_metric_needs_a_namespace(tmp_path: Path):
    monitor = Monitor(JsonlSink(tmp_path / "metrics.jsonl"))
    with pytest.raises(AssertionError, match="no namespace"):
        monitor.log(1, {"reward": 0.5})
    monitor.close()


def test_a_resumed_run_forgets_later_steps_and_a_torn_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in range(1, 6):
        first.log(step, {"reward/mean": step / 10})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 6, "rew')
    again = JsonlSink(path, resume_step=3)
    again.log(4, {"reward/mean": 0.9})
    again.close()
    assert [(row["step"], row["reward/mean"]) for row in rows(path)] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]


def test_a_fresh_run_starts_a_fresh_file(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("left over\n")
    JsonlSink(tmp_path / "metrics.jsonl").close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def accumulated(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_what_we_write_and_forgets_what_a_resume_repeats(tmp_path: Path):
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": step / 4, "trainer/loss": -1.0})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=1)
    second.log(2, {"reward/mean": 0.75})
    second.close()
    events = accumulated(tmp_path)
    assert events.Tags()["scalars"] == ["reward/mean", "training/loss"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]


def test_tensorboard_shows_what_matters_first_and_nothing_that_never_changes_or_is_there_twice(tmp_path: Path):
    """Red on the code before: 84 tags, 33 of them constant, nine twice."""
    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        sink.log(
            step,
            {
                "reward/mean": 0.5,
                "batch/reward_mean": 0.5,
                "judge/right": 0.25,
                "batch/calls": 7.0 if step < 3 else 8.0,
                "batch/groups": 16.0,
            },
        )
    sink.close()
    events = accumulated(tmp_path)
    tags = events.Tags()["scalars"]
    assert sorted(tags) == ["reward parts/judge/right", "reward/mean", "~debug/batch/calls"]
    assert [(one.step, one.value) for one in events.Scalars("~debug/batch/calls")] == [(1, 7.0), (3, 8.0)]
    assert len(events.Scalars("reward/mean")) == 3, "what matters is shown also where it stays the same"


def test_tensorboard_shows_samples_as_texts_and_settings_as_hyperparameters(tmp_path: Path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    monitor = open_monitor(run_in(tmp_path, seed=3, deterministic=True, x=None), "tensorboard", print)
    monitor.log(1, {"reward/mean": 0.5})
    monitor.sample(1, "**best**: said 4")
    monitor.close()
    events = accumulated(tmp_path / "monitor" / "tensorboard")
    (text,) = events.Tensors("samples/best and worst of the step")
    assert (text.step, text.tensor_proto.string_val[0]) == (1, b"**best**: said 4")
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert (settings["seed"].number_value, settings["deterministic"].bool_value) == (3.0, True)
    assert monitor.line == ""


class StandIn:
    """Stands for the modules of services, and what their calls return: writes down what is called."""

    info = SimpleNamespace(run_id="run-7")

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.echarts = self

    def __getattr__(self, name: str):
        def call(*positional: Any, **named: Any):
            self.calls.append((name, positional, named))
            return self

        return call


def test_wandb_gets_the_step_as_a_metric_and_one_identity_for_resumes(tmp_path: Path):
    wandb = StandIn()
    sink = WandbSink(wandb, run_in(tmp_path, "My project", "exp 1", seed=0))
    sink.log(3, {"reward/mean": 0.5})
    sink.close()
    (init, *_, log, finish) = wandb.calls
    assert init[2]["id"] == "My-project-exp-1"
    assert init[2]["resume"] == "allow"
    assert init[2]["config"] == {"seed": 0}
    assert log == ("log", ({"reward/mean": 0.5, "step": 3},), {})
    assert finish[0] == "finish"


def test_swanlab_gets_names_that_it_takes_and_one_identity_for_resumes(tmp_path: Path):
    """SwanLab refuses a project whose name has a space."""
    swanlab = StandIn()
    sink = SwanlabSink(swanlab, run_in(tmp_path, "My project", "exp 1", seed=0))
    sink.log(3, {"reward/mean": 0.5})
    sink.close()
    (init, log, finish) = swanlab.calls
    assert (init[2]["project"], init[2]["id"], init[2]["resume"]) == ("My-project", "My-project-exp-1", "allow")
    assert init[2]["config"] == {"seed": 0}
    assert log == ("log", ({"reward/mean": 0.5},), {"step": 3})
    assert finish[0] == "finish"


def test_trackio_gets_steps_and_continues_the_run_of_the_same_name(tmp_path: Path):
    """Done with the real package (0.43) by hand: the second session's rows are in the same run."""
    trackio = StandIn()
    sink = TrackioSink(trackio, run_in(tmp_path, "My project", "exp 1", seed=0))
    sink.log(3, {"reward/mean": 0.5})
    sink.close()
    (init, log, finish) = trackio.calls
    assert (init[2]["project"], init[2]["name"], init[2]["resume"]) == ("My project", "exp 1", "allow")
    assert init[2]["config"] == {"seed": 0}
    assert log == ("log", ({"reward/mean": 0.5},), {"step": 3})
    assert finish[0] == "finish"


def test_mlflow_continues_its_run_after_a_resume(tmp_path: Path):
    (tmp_path / "monitor").mkdir()
    first, second = StandIn(), StandIn()
    MlflowSink(first, run_in(tmp_path, seed=0)).log(1, {"reward/mean": 0.5})
    MlflowSink(second, run_in(tmp_path, seed=0)).close()
    assert [name for name, _, _ in first.calls] == ["set_experiment", "start_run", "log_params", "log_metrics"]
    assert first.calls[-1][2] == {"step": 1}
    assert second.calls == [
        ("set_experiment", ("p",), {}),
        ("start_run", (), {"run_id": "run-7"}),
        ("end_run", (), {}),
    ]


@pytest.mark.parametrize("name", OURS)
def test_each_keeps_the_contract(name: str, tmp_path: Path):
    """Services are stand-ins here: what they keep is theirs."""
    assert tuple(OURS) == MONITORS
    make = OURS[name][1] if name not in SERVICES else partial(SERVICES[name][1], StandIn())
    check_monitor(make, tmp_path)


class Own:
    """A monitor of somebody's, which keeps the contract as long as nothing of it is taken away."""

    def __init__(self, run: MonitoredRun) -> None:
        self.place = run.run_dir / "monitor"

    def log(self, step: int, metrics: Any) -> None:
        (self.place / f"{step}.json").write_text(json.dumps(dict(metrics)))

    def close(self) -> None:
        pass


class Finite(Own):
    def log(self, step: int, metrics: Any) -> None:
        (self.place / f"{step}.json").write_text(json.dumps(dict(metrics), allow_nan=False))


class Keeps(Own):
    def log(self, step: int, metrics: Any) -> None:
        metrics["step"] = step


class Once(Own):
    def __init__(self, run: MonitoredRun) -> None:
        super().__init__(run)
        (self.place / "here").mkdir()


class Beside(Own):
    def __init__(self, run: MonitoredRun) -> None:
        super().__init__(run)
        (run.run_dir / "metrics.jsonl").write_text("")


@pytest.mark.parametrize(
    ("monitor", "said"),
    [
        (Finite, r"log\(1, .*nan.* in a run that begins raised ValueError: Out of range"),
        (Keeps, r"raised TypeError: 'mappingproxy' object does not support item assignment"),
        (Once, r"making the monitor of a run that goes on after step 1 raised FileExistsError"),
        (Beside, r"wrote metrics.jsonl in the run's folder"),
    ],
)
def test_a_monitor_that_breaks_the_contract_is_told_how(monitor: type, said: str, tmp_path: Path):
    check_monitor(Own, tmp_path_of(tmp_path, "good"))
    with pytest.raises(AssertionError, match=said):
        check_monitor(monitor, tmp_path_of(tmp_path, "bad"))


def tmp_path_of(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def test_a_monitor_of_somebodys_own_is_opened_by_its_place(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "class Prints:\n"
        "    def __init__(self, run): print(run.project, run.resume_step)\n"
        "    def log(self, step, metrics): print(step, metrics)\n"
        "    def close(self): print('closed')\n"
        "def prints(run): return Prints(run)\n"
    )
    assert monitor_of(f"{tmp_path / 'own.py'}:Prints")[0] == "Prints"
    with pytest.raises(ConfigError, match=r"monitor_rollouts is 8, but monitor_type '.*:Prints' has no tables"):
        monitor_of(f"{tmp_path / 'own.py'}:Prints", 8)
    with pytest.raises(ConfigError, match=r"is no monitor: it must be a class with the methods log and close"):
        monitor_of(f"{tmp_path / 'own.py'}:prints")


ROWS = [{"rollout": "step-0/t/0", "reward": None}, {"rollout": "step-0/t/1", "reward": 1.0}]


def test_rollouts_are_tables_where_there_are_tables(tmp_path: Path):
    """Done by hand with W&B 0.31, MLflow 3.17, SwanLab 0.10 and Trackio 0.43: the rows are in what they write."""
    (tmp_path / "monitor").mkdir()
    modules = {name: StandIn() for name in SERVICES}
    for name, (title, service) in SERVICES.items():
        place = TolerantSink(title, partial(service, modules[name], run_in(tmp_path)), pytest.fail)
        monitor = Monitor(JsonlSink(tmp_path / f"{name}.jsonl"), place)
        monitor.rollouts(101, ROWS)
        monitor.rollouts(102, [])
        monitor.close()
    of_table, of_log, _ = modules["wandb"].calls[-3:]
    assert of_table == ("Table", (), {"columns": ["rollout", "reward"], "data": [list(row.values()) for row in ROWS]})
    assert (of_log[0], of_log[1][0]["step"]) == ("log", 101)
    data = {"step": [101, 101], "rollout": ["step-0/t/0", "step-0/t/1"], "reward": [None, 1.0]}
    of_table, _ = modules["mlflow"].calls[-2:]
    assert of_table == ("log_table", (), {"data": data, "artifact_file": "rollouts/steps-000101-000200.json"})
    of_table, of_log, _ = modules["trackio"].calls[-3:]
    assert of_table == ("Table", (), {"data": ROWS})
    assert (of_log[0], of_log[2]) == ("log", {"step": 101})
    of_table, of_add, of_log, _ = modules["swanlab"].calls[-4:]
    assert of_add == ("add", (["rollout", "reward"], [list(row.values()) for row in ROWS]), {})
    assert (of_log[0], of_log[2]) == ("log", {"step": 101})


def test_rollouts_where_there_are_no_tables_are_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"monitor_rollouts is 8, but monitor_type 'tensorboard' .* mlflow"):
        monitor_of("tensorboard", 8)
    monitor_of("tensorboard")


class Away(StandIn):
    """Stands for a package whose service is away for the requests named in `away`."""

    def __init__(self, *away: str) -> None:
        super().__init__()
        self.away = set(away)

    def __getattr__(self, name: str):
        if name in self.away:
            raise ConnectionResetError(f"{name}: connection reset by peer\nmore lines")
        return super().__getattr__(name)


def test_a_request_that_a_monitor_refuses_is_said_once_and_counted_and_the_run_goes_on(tmp_path: Path):
    """Red when `Monitor.log` lets the error of a service through."""
    said: list[str] = []
    service = Away()
    (tmp_path / "monitor").mkdir()
    place = TolerantSink("MLflow", lambda: MlflowSink(service, run_in(tmp_path)), said.append)
    monitor = Monitor(JsonlSink(tmp_path / "metrics.jsonl"), place)
    monitor.log(1, {"reward/mean": 0.1})
    service.away.add("log_metrics")
    monitor.log(2, {"reward/mean": 0.2})
    monitor.log(3, {"reward/mean": 0.3})
    service.away.clear()
    monitor.log(4, {"reward/mean": 0.4})
    monitor.close()
    found = rows(tmp_path / "metrics.jsonl")
    assert [(row["reward/mean"], row.get("monitor/refused")) for row in found] == [
        (0.1, None),
        (0.2, None),
        (0.3, 1.0),
        (0.4, 2.0),
    ]
    (line,) = said
    assert "MLflow could not take the numbers of step 2 (ConnectionResetError: log_metrics: connection reset" in line
    assert "more lines" not in line
    assert monitor.line == "MLflow refused 2 writes at first, and took them later"


def test_a_monitor_that_cannot_be_opened_or_closed_does_not_end_the_run(tmp_path: Path):
    said: list[str] = []
    for away in ("init", "finish"):
        place = TolerantSink("W&B", lambda away=away: WandbSink(Away(away), run_in(tmp_path)), said.append)
        monitor = Monitor(JsonlSink(tmp_path / "metrics.jsonl"), place)
        monitor.log(1, {"reward/mean": 0.1})
        monitor.close()
    assert [line.split(" (")[0].strip() for line in said] == ["! W&B could not be opened", "! W&B could not be closed"]


def test_metrics_jsonl_itself_is_not_given_up_in_silence(tmp_path: Path):
    """`/dev/full` is a disk without space."""
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(JournalError, match=r"metrics of step 3 could not be written .*free some space"):
        sink.log(3, {"reward/mean": 0.5})


@pytest.mark.parametrize("package", ["wandb", "mlflow", "swanlab"])
def test_a_missing_package_is_said_with_what_to_install(package, tmp_path: Path):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=re.escape(install_command(package))):
        monitor_of(package)
    with pytest.raises(ConfigError, match="needs the package"):
        open_monitor(run_in(tmp_path), package, print)
