"""Run directories that mean harm, opened by every command: no code runs, nothing else is written, nothing hangs.

Each is the run of `shop_runs` with one thing changed. A secret stands beside it, as another file of the user's.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from addresses import PAGES
from shop_runs import Maker, RunSize, make_run

from sharpen.cli.main import main
from sharpen.config.load import read_yaml
from sharpen.errors import ConfigError, JournalError
from sharpen.learning.experience.images import ImageFolder
from sharpen.learning.experience.opening import open_journal
from sharpen.learning.trainer.checkpoint import pointed
from sharpen.run.lock import locked
from sharpen.show.report.card import front_matter, write_cards
from sharpen.show.view.folders import Folder
from sharpen.show.view.notes import new_note, write_note

SECRET = "the-secret-of-another-file"
DEEP = "[" * 200_000
LONG = "WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more) SELECT n FROM more"


def sql(run: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run / "run.db")) as journal, journal:
        journal.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            journal.execute(statement)


def as_view(table: str) -> Callable[[Path], None]:
    """The table renamed, and a view of its name that never ends."""

    def change(run: Path) -> None:
        sql(run, f"ALTER TABLE {table} RENAME TO real_{table}", f"CREATE VIEW {table} AS {LONG}")

    return change


def linked(name: str, target: str) -> Callable[[Path], None]:
    """A file of the run replaced by a link."""

    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target.format(outside=run.parent / "outside"))

    return change


def pipe(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(text, encoding="utf-8") and None


def setting(name: str, value: Any) -> Callable[[Path], None]:
    """A setting of resolved.json replaced."""

    def change(run: Path) -> None:
        resolved = json.loads((run / "resolved.json").read_text())
        resolved[name] = {"value": value, "origin": "run.yaml"}
        (run / "resolved.json").write_text(json.dumps(resolved).replace("PLACE", str(run.parent / "outside")))

    return change


def pointer(name: str, target: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).write_text(target.format(outside=run.parent / "outside") + "\n")

    return change


HARM: dict[str, Callable[[Path], None]] = {
    **{f"{table} is a view": as_view(table) for table in ("meta", "groups", "rollouts", "texts")},
    "a trigger": lambda run: sql(run, "CREATE TRIGGER t AFTER INSERT ON steps BEGIN DELETE FROM steps; END"),
    "a virtual table": lambda run: sql(run, "CREATE VIRTUAL TABLE evil USING fts5(a)"),
    "a computed column": lambda run: sql(run, "ALTER TABLE steps ADD COLUMN x AS (abs(step)) VIRTUAL"),
    "an index that computes": lambda run: sql(run, "CREATE INDEX evil ON steps (abs(step)) WHERE step > 0"),
    "deep JSON in a table": lambda run: sql(run, f"UPDATE texts SET json = '{DEEP}'"),
    "numbers that are texts": lambda run: sql(run, "UPDATE rollouts SET reward = 'x', idx = 'y', seconds = 'z'"),
    "texts that are bytes": lambda run: sql(run, "UPDATE calls SET response = x'ff', messages_suffix = x'00'"),
    "outcomes that are none": lambda run: sql(run, "UPDATE rollouts SET outcome = '../../x'"),
    "calls that follow none": lambda run: sql(run, "UPDATE calls SET base = 99, prompt_kept = -5, messages_kept = -1"),
    "calls that follow themselves": lambda run: sql(run, "UPDATE calls SET base = idx, parent = idx"),
    "great numbers": lambda run: sql(run, f"UPDATE calls SET prompt_kept = {2**62}, idx = idx + {2**40}"),
    "metrics that are no numbers": lambda run: sql(run, 'UPDATE rollouts SET metrics = \'{"a": [1], "b": 1e999}\''),
    "arrays of half a number": lambda run: sql(run, "UPDATE calls SET sampled = x'010203', logprobs = x'01'"),
    **{f"deep {name}": written(name, DEEP) for name in ("summary.json", "resolved.json", "metrics.jsonl")},
    "a great number in JSON": written("summary.json", f'{{"verdict": {"9" * 10_000}}}'),
    "settings of settings": written("resolved.json", '{"a": {"value": 1, "origin": 2}, "a.b": {"value": 1}, "x": 5}'),
    "a link as summary": linked("summary.json", "{outside}/secret.json"),
    "a link as metrics": linked("metrics.jsonl", "{outside}/secret.json"),
    "a link as report": linked("report.html", "{outside}/precious"),
    "a link as notes": linked("notes.jsonl", "{outside}/precious"),
    "a link to a device": linked("summary.json", "/dev/zero"),
    "a pipe as settings": pipe("resolved.json"),
    "a pipe as metrics": pipe("metrics.jsonl"),
    "a checkpoint elsewhere": linked("global_step_9", "{outside}"),
    "a pointer elsewhere": pointer("latest", "{outside}"),
    "a pointer above": pointer("latest", "../outside"),
    "code as workflow": setting("workflow", "PLACE/evil.py:run"),
    "code as operator": setting("sampling.operators", [{"name": "PLACE/evil.py:run", "args": {}}]),
    **{
        f"code as {name}": setting(name, "PLACE/evil.py:run")
        for name in (
            *("algorithm.algorithm_type", "loss.advantage", "loss.policy_loss", "loss.kl", "loss.aggregation"),
            *("monitor_type", "engine.type", "train_dataset.path", "model.tool_call_parser", "model.reasoning_parser"),
        )
    },
    **{f"code as {name}": setting(name, ["PLACE/evil.py:run"]) for name in ("families", "gateway.protocols")},
    "a model elsewhere": setting("model.model_path", "PLACE"),
}
COMMANDS = (
    "ls --root {root}",
    "show {run}",
    "show {run} --best --json",
    "show {run} --tokens --step 1",
    "diagnose {run}",
    "certify {run}",
    "compare {run} {other}",
    "report {run} --md",
    "report {run}",
    "export {run} --for datasets --to {run}/rows.jsonl",
    "export {run} --for gguf --to {run}/model.gguf",
    "rescore {run} --judge {judge}:judge",
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run before anything is changed."""
    size = RunSize(steps=2, batch_size=1, group_size=2, tasks=2, held_out=2)
    return make_run(tmp_path_factory.mktemp("good") / "P" / "run", Maker(size=size))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What is the user's own, beside the runs."""
    folder = tmp_path / "P" / "outside"
    folder.mkdir(parents=True)
    (folder / "secret.json").write_text(json.dumps({"verdict": {"text": SECRET}, "step": 1, SECRET: 1.0}))
    (folder / "precious").write_text("precious\n")
    (folder / "evil.py").write_text("open(__file__ + '.ran', 'w').close()\ndef run(*a, **b): ...\n")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def copy(good: Path, tmp_path: Path, outside: Path) -> Path:
    run = shutil.copytree(good, tmp_path / "P" / "run", symlinks=True)
    (tmp_path / "judge.py").write_text("async def judge(task, response):\n    return 1.0\n")
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HARM)
def test_every_command_ends_and_does_nothing_else(
    name: str, good: Path, copy: Path, outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HARM[name](copy)
    before = contents(outside)
    for command in COMMANDS:
        words = command.format(root=tmp_path, run=copy, other=good, judge=tmp_path / "judge.py").split()
        code = main(words)
        assert code in (0, 1, 2), words
    said = capsys.readouterr()
    assert contents(outside) == before
    assert "Traceback" not in said.err
    if name != "a link as summary":
        assert SECRET not in f"{said.out}{said.err}"


VIEWED = ("meta is a view", "rollouts is a view", "a pipe as metrics", "a link to a device", "calls that follow none")


@pytest.mark.parametrize("name", VIEWED)
def test_the_pages_open_with_what_can_be_read(name: str, copy: Path, outside: Path, client: Any, library: Any) -> None:
    HARM[name](copy)
    before = contents(outside)
    key = library(copy).index(Folder.of(copy), wait_s=120).folder.key
    http = client(copy)
    for page in PAGES:
        assert http.get(page.format(run=key)).status_code in (200, 404, 503), page
    assert contents(outside) == before


@pytest.mark.parametrize(
    "name", [name for name in HARM if "view" in name or name.startswith(("a trigger", "a virtual", "a computed"))]
)
def test_a_database_that_computes_something_is_no_journal(name: str, copy: Path) -> None:
    """Red with its tables read as they are: a view of the name of one never ends."""
    HARM[name](copy)
    with pytest.raises(JournalError, match=r"computes something when it is read.* (DROP|ALTER) "):
        open_journal(copy / "run.db")


@pytest.mark.parametrize("name", ["monitor", "metrics.jsonl", "run.lock", "global_step_x", "notes"])
def test_a_run_with_links_out_of_it_is_not_written_to(name: str, copy: Path, outside: Path) -> None:
    """Red with links followed: `run` appended to the file that metrics.jsonl led to, `report` wrote a card into the
    folder that was no checkpoint."""
    if (copy / name).is_dir():
        shutil.rmtree(copy / name)
    linked(name, "{outside}/precious" if "." in name else "{outside}")(copy)
    before = contents(outside)
    with pytest.raises(ConfigError, match=rf"{name}.*leads out of"), locked(copy):
        pass
    with pytest.raises(OSError, match="leads out of"):
        write_note(copy, new_note("step-0/train/0/0", "run.db", 1, "up", ""))
    assert main(["report", str(copy)]) == 2
    assert contents(outside) == before


def test_links_within_a_run_are_its_own(copy: Path) -> None:
    (copy / "newest").symlink_to("run.db")
    with locked(copy):
        pass


@pytest.mark.parametrize("name", ["global_step_7", "exchange", "images"])
def test_what_is_large_may_be_on_another_disk(name: str, copy: Path, outside: Path) -> None:
    """Red with every link refused. Nothing is written there, neither by a report: it put its card into the folder."""
    if (copy / name).is_dir():
        shutil.rmtree(copy / name)
    (copy / name).symlink_to(outside)
    (copy / "best").unlink(missing_ok=True)
    (copy / "best").symlink_to(name)
    before = contents(outside)
    with locked(copy):
        pass
    write_note(copy, new_note("step-0/train/0/0", "run.db", 1, "up", ""))
    assert main(["report", str(copy)]) == 0
    assert contents(outside) == before


@pytest.mark.parametrize(("name", "through"), [("monitor", "images"), ("metrics.jsonl", "global_step_7"), ("a", "a/b")])
def test_no_other_link_leads_through_these(name: str, through: str, copy: Path, outside: Path) -> None:
    """`images` is a folder elsewhere, `global_step_7` a file."""
    for link in ("images", "monitor", name):
        if (copy / link).is_dir():
            shutil.rmtree(copy / link)
    (copy / name).unlink(missing_ok=True)
    (copy / "images").symlink_to(outside)
    if through == "global_step_7":
        (copy / through).symlink_to(outside / "precious")
    (copy / name).symlink_to("images/b" if through == "a/b" else through)
    with pytest.raises(ConfigError, match=r"leads out of"), locked(copy):
        pass


def test_the_first_link_that_leads_out_is_named(copy: Path, outside: Path) -> None:
    """Red with `latest` named, which is ours: it led to a checkpoint that is no folder."""
    (copy / "global_step_7").symlink_to(outside / "precious")
    (copy / "latest").unlink()
    (copy / "latest").symlink_to("global_step_7")
    with pytest.raises(ConfigError, match=r"global_step_7: .*leads out of"), locked(copy):
        pass


def test_the_logs_of_a_monitoring_service_are_its_own(copy: Path, outside: Path) -> None:
    """Red with every link refused: W&B links to its log in the user's cache, and no run with it went on."""
    logs = copy / "monitor" / "wandb" / "run-20260101_000000-ab" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(outside / "core-debug-20260101_000000.log")
    with locked(copy):
        pass
    write_note(copy, new_note("step-0/train/0/0", "run.db", 1, "up", ""))
    assert main(["report", str(copy)]) == 0


@pytest.mark.parametrize("name", ["monitor/wandb", "monitor/tensorboard", "monitor/mlflow_run_id"])
def test_what_a_run_opens_below_monitor_is_in_it(name: str, copy: Path, outside: Path) -> None:
    (copy / "monitor").mkdir(exist_ok=True)
    (copy / name).symlink_to(outside, target_is_directory=True)
    with pytest.raises(ConfigError, match=rf"{name}.*leads out of"), locked(copy):
        pass


@pytest.mark.parametrize("target", ["../outside", "{outside}", "..", "."])
def test_a_pointer_leads_to_a_checkpoint_of_the_run(target: str, copy: Path, outside: Path) -> None:
    for make in (pointer, linked):
        make("latest", target)(copy)
        assert pointed(copy, "latest") is None


@pytest.mark.parametrize("name", ["../outside/precious", "a" * 63, "A" * 64, "/etc/passwd", ""])
def test_an_image_is_named_by_a_hash(name: str, copy: Path) -> None:
    with pytest.raises(ValueError, match="is not the hash of an image"):
        ImageFolder(copy / "run.db").picture(name)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [(LAUGHS, "aliases stand for more than"), ("a: &a {b: *a}\n", "holds itself"), (f"a: {DEEP[:5000]}", "too deep")],
)
def test_configurations_that_multiply_are_refused(text: str, said: str, tmp_path: Path) -> None:
    """Red with aliases followed: 9 lines stand for 400 million values."""
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_yaml(tmp_path / "run.yaml")


def test_a_card_of_another_model_gives_texts_alone(copy: Path) -> None:
    """Red with any value taken over: what aliases stand for was written out."""
    checkpoint = next(path for path in copy.glob("global_step_*"))
    (checkpoint / "README.md").write_text(f"---\n{LAUGHS}license: *i\nlanguage: [en, zh]\n---\n")
    write_cards(copy)
    head = front_matter((checkpoint / "README.md").read_text())
    assert head["language"] == ["en", "zh"]
    assert "license" not in head
    assert front_matter(f"---\nlicense: {DEEP[:5000]}\n---\n") == {}
