"""A run's directory: found again, put right after a kill, never begun anew over what was trained."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sharpen.config.load import ResolvedConfig, resolve
from sharpen.config.rows import Row
from sharpen.config.run import RunConfig
from sharpen.errors import CheckpointError, ConfigError
from sharpen.evidence.ended import read_ended
from sharpen.learning.experience.journal import Journal
from sharpen.learning.trainer.checkpoint import (
    STATE,
    Pointer,
    is_whole,
    point,
    pointed,
    prune,
    repair,
    step_directory,
    write_directory,
)
from sharpen.learning.trainer.checksums import write_checksums
from sharpen.models.identity import Identity, model_identity
from sharpen.run.directory import RunDirectory, open_run_directory
from sharpen.run.identity import changed_rows, parts_identities, rows_identity
from sharpen.types import Group, Task

NOTHING: Mapping[str, Identity] = {}
ROWS: Mapping[str, Identity] = {"train_dataset": {"rows": 40, "digest": "ab"}, "model": {"bytes": 900, "digest": "cd"}}


def settings(root: Path, **changed: object) -> ResolvedConfig:
    """Of the run `one`; a changed setting is named with `__` for its dots."""
    given = {
        "checkpoint_root_dir": str(root),
        "name": "one",
        "train_dataset.path": "tasks.jsonl",
        "model": {"model_path": "toy", "max_model_len": 64},
        **{name.replace("__", "."): value for name, value in changed.items()},
    }
    return resolve(None, given)


def checkpoint(root: Path, step: int, content: str = "") -> Path:
    """A checkpoint with everything that one has, in small."""

    def write(partial: Path) -> None:
        (partial / STATE).mkdir()
        for name in ("config.json", f"{STATE}/state.json"):
            (partial / name).write_text("{}")
        for name in ("model", f"{STATE}/optimizer", f"{STATE}/random"):
            (partial / f"{name}.safetensors").write_text(content)

    target = step_directory(root, step)
    write_directory(target, write)
    return target


def run_directory(root: Path, *steps: int) -> Path:
    """That of the run `one`, which has trained so many steps; the last is `latest`."""
    path = root / "Sharpen" / "one"
    path.mkdir(parents=True, exist_ok=True)
    for step in steps:
        point(path, "latest", checkpoint(path, step))
    lines = [json.dumps({"step": step, "reward/mean": 0.5}) for step in range(max(steps, default=0) + 1)]
    (path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    if steps:
        with Journal(path / "run.db") as journal:
            for step in range(1, max(steps) + 1):
                journal.add_step(step, step, {})
    return path


def opened(resolved: ResolvedConfig, identities: Mapping[str, Identity] = NOTHING) -> RunDirectory:
    with open_run_directory(resolved, None, identities) as directory:
        return directory


def begun(root: Path, *steps: int, identities: Mapping[str, Identity] = NOTHING, **changed: object) -> Path:
    """The directory of a run that was begun with these settings and has trained so many steps."""
    opened(settings(root, **changed), identities)
    return run_directory(root, *steps)


def kill_in_replacement(path: Path, step: int) -> None:
    """Write a checkpoint again in a process of its own, which is gone between the two renames."""
    target = step_directory(path, step)

    class Dies(type(target)):  # type: ignore[misc]
        def rename(self, new):
            if not Path(new).name.endswith(".replaced"):
                os._exit(9)
            return super().rename(new)

    if (child := os.fork()) == 0:
        write_directory(Dies(target), lambda partial: None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not target.exists()


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path):
    """Red without `repair`: `latest` points to nothing, and the run began anew over its own records."""
    path = begun(tmp_path, 2, 4)
    kill_in_replacement(path, 4)
    assert pointed(path, "latest") is None
    directory = opened(settings(tmp_path))
    assert directory.checkpoint == step_directory(path, 4)
    assert is_whole(directory.checkpoint)
    (note,) = directory.notes
    assert "global_step_4" in note
    assert not list(path.glob(".global_step_*"))
    assert opened(settings(tmp_path)).notes == ()


def test_an_interrupt_between_the_two_renames_leaves_nothing_behind(tmp_path: Path):
    """A second Ctrl-C there. Red when only failures of the disk are cleaned up behind."""
    path = run_directory(tmp_path, 2)

    class Interrupted(type(path)):  # type: ignore[misc]
        def rename(self, new):
            if self.name.endswith(".partial"):
                raise KeyboardInterrupt
            return super().rename(new)

    with pytest.raises(KeyboardInterrupt):
        write_directory(Interrupted(step_directory(path, 2)), lambda partial: None)
    assert is_whole(step_directory(path, 2))
    assert not list(path.glob(".global_step_*"))


def test_what_a_kill_behind_the_renames_left_goes(tmp_path: Path):
    path = run_directory(tmp_path, 4)
    checkpoint(path, 4, "old").rename(path / ".global_step_4.replaced")
    checkpoint(path, 4, "new")
    (path / ".global_step_6.partial").mkdir()
    (path / ".global_step_2.removed").mkdir()
    (path / ".latest.partial").symlink_to("global_step_2")
    (path / ".metrics.jsonl.17-ab.partial").touch()
    assert repair(path) == []
    assert not list(path.glob(".*"))
    assert (path / "global_step_4" / "model.safetensors").read_text() == "new"
    assert not list(path.glob(".global_step_*"))


@pytest.mark.parametrize("how", ["missing", "dangling", "empty", "not whole"])
def test_a_broken_latest_is_put_right_from_the_newest_whole_checkpoint(how: str, tmp_path: Path):
    path = begun(tmp_path, 2, 4, 10)
    (path / "global_step_10" / STATE / "optimizer.safetensors").unlink()
    (path / "latest").unlink()
    if how == "dangling":
        point(path, "latest", step_directory(path, 12))
    elif how == "empty":  # without symbolic links a pointer is a file
        (path / "latest").write_text("")
    elif how == "not whole":
        point(path, "latest", step_directory(path, 10))
    directory = opened(settings(tmp_path))
    assert directory.checkpoint == step_directory(path, 4)
    (note,) = directory.notes
    assert "`latest`" in note
    assert "now points to global_step_4" in note
    assert pointed(path, "latest") == step_directory(path, 4)


@pytest.mark.parametrize("changed", ["model", f"{STATE}/optimizer", f"{STATE}/state"])
def test_a_checkpoint_that_has_changed_is_passed_over_and_named(changed: str, tmp_path: Path):
    """Red without checksums: the run went on with a flipped bit in its weights."""
    path = begun(tmp_path, 2, 4, 10)
    for step in (2, 4, 10):
        write_checksums(path / f"global_step_{step}")
    assert opened(settings(tmp_path)).checkpoint == step_directory(path, 10)
    (file,) = path.glob(f"global_step_10/{changed}.*")
    file.write_bytes(b"other")
    directory = opened(settings(tmp_path))
    assert directory.checkpoint == step_directory(path, 4)
    (note,) = directory.notes
    assert f"passed over: global_step_10, whose {file.relative_to(path / 'global_step_10')} changed" in note
    assert "now points to global_step_4" in note


def test_a_best_that_points_to_nothing_goes(tmp_path: Path):
    path = begun(tmp_path, 2)
    point(path, "best", step_directory(path, 7))
    (note,) = opened(settings(tmp_path)).notes
    assert "`best` pointed to global_step_7" in note
    assert not os.path.lexists(path / "best")


@pytest.mark.parametrize("name", ["latest", "best"])
@pytest.mark.parametrize(
    "target", ["global_step_2/", "./global_step_2", "{run}/global_step_2", "{run}/./global_step_2/"]
)
def test_a_pointer_that_somebody_wrote_is_followed(target: str, name: Pointer, tmp_path: Path):
    """Red with its text taken as a name: `best` was deleted, and the run of `latest` had no checkpoint."""
    path = begun(tmp_path, 2)
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(target.format(run=path))
    directory = opened(settings(tmp_path))
    assert directory.notes == ()
    assert pointed(path, name) == directory.checkpoint == step_directory(path, 2)


def test_a_pointer_out_of_the_run_is_set_right(tmp_path: Path):
    """Red with a whole checkpoint elsewhere taken for the run's own: then it had none."""
    path = begun(tmp_path, 2)
    other = checkpoint(tmp_path, 9)
    for name in ("latest", "best"):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(other)
    notes = repair(path)
    assert [f"{name}` " in note for name, note in zip(("best", "latest"), notes, strict=True)] == [True, True]
    assert pointed(path, "latest") == step_directory(path, 2)
    assert pointed(path, "best") is None


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read at its beginning")
def test_what_cannot_be_read_now_is_not_damaged(tmp_path: Path):
    """Red with an error of the disk taken for damage: `latest` went back to step 2, and training would have overwritten
    step 4, which is whole."""
    path = begun(tmp_path, 2, 4)
    write_checksums(path / "global_step_4")
    weights = path / "global_step_4" / "model.safetensors"
    weights.rename(tmp_path / "kept")
    weights.symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"global_step_4.*cannot be read now \(Input/output error\)"):
        repair(path)
    assert pointed(path, "latest") == step_directory(path, 4)
    weights.unlink()
    (tmp_path / "kept").rename(weights)
    assert repair(path) == []


def test_a_checkpoint_on_another_disk_is_used_and_replaced_as_a_link(tmp_path: Path):
    """Red with the lock naming `latest`, and with a link that no one could remove."""
    path, disk = begun(tmp_path, 2, 4), tmp_path / "disk"
    disk.mkdir()
    for step in (2, 4):
        (path / f"global_step_{step}").rename(disk / f"{step}")
        (path / f"global_step_{step}").symlink_to(disk / f"{step}")
    assert opened(settings(tmp_path)).checkpoint == step_directory(path, 4)
    checkpoint(path, 4, "new")
    assert not (path / "global_step_4").is_symlink()
    assert prune(path, 0) == [step_directory(path, 2)]
    assert sorted(file.name for file in path.glob("*global_step_*")) == ["global_step_4"]
    for step in (2, 4):
        assert is_whole(disk / f"{step}")


def test_a_directory_without_a_complete_checkpoint_is_refused_and_left_unchanged(tmp_path: Path):
    path = run_directory(tmp_path, 2)
    (path / "global_step_2" / STATE / "state.json").unlink()
    before = sorted(file.name for file in path.iterdir())
    with pytest.raises(CheckpointError, match=r"no checkpoint there is .*\(global_step_2, .*trainer_state/state.json"):
        opened(settings(tmp_path))
    assert sorted(file.name for file in path.iterdir()) == sorted([*before, "run.lock"])


@pytest.mark.parametrize("record", ["run.db", "metrics.jsonl"])
def test_steps_without_a_checkpoint_are_never_begun_anew_over(record: str, tmp_path: Path):
    """Red when a missing `latest` means a fresh run: the metrics of its steps were wiped without a word."""
    path = run_directory(tmp_path, 3)
    for pointer in ("latest", "global_step_3"):
        (path / pointer).rename(tmp_path / pointer)
    (path / ("metrics.jsonl" if record == "run.db" else "run.db")).unlink()
    before = (path / record).read_bytes()
    with pytest.raises(ConfigError, match=r"'one' has trained 3 steps .* no checkpoint .*Move or delete the"):
        opened(settings(tmp_path))
    assert (path / record).read_bytes() == before
    assert not (path / "resolved.json").exists()


def test_a_deleted_journal_is_said_where_a_run_goes_on(tmp_path: Path):
    """Red when the certificate alone says so, after all that was trained on top."""
    path = begun(tmp_path, 2, 4)
    (path / "run.db").unlink()
    (note,) = opened(settings(tmp_path)).notes
    assert "4 of the 4 steps behind global_step_4 (1 to 4)" in note
    assert "certificate" in note
    with Journal(path / "run.db") as journal:
        for step in (1, 4):
            journal.add_step(step, step, {})
    (note,) = opened(settings(tmp_path)).notes
    assert "2 of the 4 steps behind global_step_4 (2 to 3)" in note


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("name", ["run.db", "evaluations.db", "metrics.jsonl"])
@pytest.mark.parametrize("damage", [cut, lambda file: file.write_bytes(b"\xff\x00 overwritten\n" * 300)])
@pytest.mark.parametrize("saved", [True, False])
def test_a_damaged_record_is_named_before_anything_is_loaded(name: str, damage, saved: bool, tmp_path: Path):
    """And what the sentence says to do works. Red while a damaged `run.db` ended in an error of SQLite's, and damaged
    evaluations in the middle of the run."""
    path = begun(tmp_path, 2)
    with Journal(path / "evaluations.db") as journal:
        journal.add(Group(id="before/held-out/sampled/t", task=Task(id="t", index=0, row={}), rollouts=(), version=0))
    if not saved:
        for pointer in ("latest", "global_step_2"):
            (path / pointer).rename(tmp_path / pointer)
    damage(path / name)
    if name == "metrics.jsonl" and damage is cut:
        (path / name).write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and file.suffix != ".lock"}
    with pytest.raises(
        ConfigError, match=rf"'one' cannot go on: .*{name}.*Restore it .* or move {name} out of"
    ) as said:
        opened(settings(tmp_path))
    assert "\n" not in str(said.value)
    assert {file: (path / file).read_bytes() for file in before} == before
    (path / name).rename(tmp_path / name)
    if saved:
        directory = opened(settings(tmp_path))
        assert directory.checkpoint == step_directory(path, 2)


def test_an_empty_record_is_said(tmp_path: Path):
    """A journal that is, after steps were trained, cannot be restored from nothing: that is asked about."""
    path = begun(tmp_path, 2)
    for name in ("evaluations.db", "metrics.jsonl"):
        (path / name).write_bytes(b"")
    assert [note.partition(":")[0] for note in opened(settings(tmp_path)).notes] == [
        "evaluations.db is empty",
        "metrics.jsonl is empty",
    ]
    (path / "run.db").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"run\.db is empty, though steps were trained\. Restore it"):
        opened(settings(tmp_path))


@pytest.mark.parametrize("name", ["run.db", "summary.json", "report.html"])
def test_a_folder_in_the_place_of_a_file_is_named(name: str, tmp_path: Path):
    """Red while a folder `summary.json` ended the run in a traceback, after all its steps."""
    path = begun(tmp_path, 2)
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} is a folder, where the run has a file: move it"):
        opened(settings(tmp_path))


def test_a_run_that_trained_no_step_is_begun_anew(tmp_path: Path):
    """A check that failed, an evaluation before: nothing to lose."""
    path = run_directory(tmp_path)
    Journal(path / "run.db").close()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert opened(settings(tmp_path)).checkpoint is None


def test_a_directory_is_held_while_it_is_open(tmp_path: Path):
    def twice() -> None:
        with open_run_directory(settings(tmp_path), None, NOTHING):
            opened(settings(tmp_path))

    with pytest.raises(ConfigError, match="'one' is in use"):
        twice()
    assert opened(settings(tmp_path)).checkpoint is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room"), ConfigError("does not fit")])
def test_whatever_ends_a_run_in_its_directory_is_noted_there_and_a_refused_start_is_not(
    tmp_path: Path, error: BaseException
):
    """Before the first step too: a model that cannot be loaded, a check that failed, Ctrl-C. Red when only the loop
    writes it, or when a process that may not have the directory writes into it."""
    with pytest.raises(type(error)), open_run_directory(settings(tmp_path), None, NOTHING) as directory:
        raise error
    noted = read_ended(directory.path)
    assert noted is not None
    assert noted.kind == type(error).__name__
    run_directory(tmp_path, 1)
    with pytest.raises(ConfigError, match="group_size: 8 -> 3"):
        opened(settings(tmp_path, algorithm__group_size=3))
    assert read_ended(directory.path) == noted
    opened(settings(tmp_path))
    assert read_ended(directory.path) is None


def test_runs_of_the_same_second_get_names_of_their_own(tmp_path: Path):
    names = {opened(settings(tmp_path, name=None)).path.name for _ in range(4)}
    assert len(names) == 4


def resolved_of(path: Path, name: str = "resolved.json") -> dict[str, object]:
    return {key: entry["value"] for key, entry in json.loads((path / name).read_text()).items()}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"algorithm__algorithm_type": "dapo"}, "algorithm.algorithm_type: 'multi_step_grpo' -> 'dapo'"),
        ({"model__model_path": "other"}, "model.model_path: 'toy' -> 'other'"),
        ({"train_dataset__path": "more.jsonl"}, "train_dataset.path: 'tasks.jsonl' -> 'more.jsonl'"),
        ({"eval_dataset__path": "test.jsonl"}, "eval_dataset.path: none -> 'test.jsonl'"),
        ({"workflow_args": {"a.b": 3}}, "workflow_args.a.b: none -> 3"),
        (
            {"auxiliary_models__judge": {"model_path": "j", "max_model_len": 9}},
            "auxiliary_models.judge.model_path: none",
        ),
        ({"trainer__lora": {"rank": 4}}, "trainer.lora.rank: none -> 4"),
        ({"seed": 1, "loss__kl": "k1"}, "loss.kl: none -> 'k1'\n  - seed: 0 -> 1"),
    ],
)
def test_another_run_under_the_same_name_is_refused_with_both_values(changed, said: str, tmp_path: Path):
    """Red when only kind and model name are compared: the run went on, and its settings were overwritten, which broke
    the certificate."""
    path = begun(tmp_path, 2)
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    with pytest.raises(ConfigError) as refused:
        opened(settings(tmp_path, **changed))
    assert said in str(refused.value)
    assert "choose another name (`name`, or experiment_name in Python)" in str(refused.value)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    ("section", "newer"),
    [
        ({"trainer__lora": {"rank": 4}}, "trainer.lora.experts"),
        ({"auxiliary_models__judge": {"model_path": "j", "max_model_len": 9}}, "auxiliary_models.judge.temperature"),
    ],
)
def test_a_setting_that_is_newer_than_the_record_counts_as_its_default_in_optional_sections_too(
    section: dict[str, object], newer: str, tmp_path: Path
):
    """Red when only sections that are always there have defaults: `trainer.lora.experts: none -> False`."""
    path = begun(tmp_path, 2, **section)
    recorded = json.loads((path / "resolved.json").read_text())
    default = recorded.pop(newer)["value"]
    (path / "resolved.json").write_text(json.dumps(recorded))
    assert default is not None
    assert opened(settings(tmp_path, **section)).notes == ()
    (path / "resolved.json").write_text(json.dumps(recorded))
    (name,), (values,) = zip(*section.items(), strict=True)
    other = {name: {**values, newer.rpartition(".")[2]: True if default is False else 0.5}}
    with pytest.raises(ConfigError, match=f"{newer}: {default!r} -> "):
        opened(settings(tmp_path, **other))


def test_what_may_change_is_said_and_the_settings_before_are_kept(tmp_path: Path):
    path = begun(tmp_path, 2, 4, algorithm__learning_rate=1e-3)
    again = settings(tmp_path, algorithm__learning_rate=1e-4, train_dataset__total_steps=9)
    assert opened(again).notes == (
        "changed since the run last started: algorithm.learning_rate: 0.001 -> 0.0001",
        "changed since the run last started: train_dataset.total_steps: none -> 9",
    )
    assert opened(again).notes == ()
    assert resolved_of(path)["algorithm.learning_rate"] == 1e-4
    assert resolved_of(path, "resolved.until_step_4.json")["algorithm.learning_rate"] == 1e-3
    assert len(list(path.glob("resolved.until_step_*.json"))) == 1


def test_settings_whose_steps_were_undone_are_not_kept(tmp_path: Path):
    """1e-3 made steps up to 4; 1e-4 went on from there and was killed; so did 1e-5; then `latest` was set back to 2."""
    path = begun(tmp_path, 2, 4, algorithm__learning_rate=1e-3)
    for rate in (1e-4, 1e-5):
        opened(settings(tmp_path, algorithm__learning_rate=rate))
    assert resolved_of(path, "resolved.until_step_4.json")["algorithm.learning_rate"] == 1e-3
    point(path, "latest", step_directory(path, 2))
    opened(settings(tmp_path, algorithm__learning_rate=1e-6))
    assert [file.name for file in path.glob("resolved.until_step_*.json")] == ["resolved.until_step_2.json"]
    assert resolved_of(path, "resolved.until_step_2.json")["algorithm.learning_rate"] == 1e-3


def test_what_has_moved_is_known_by_what_it_holds(tmp_path: Path):
    begun(tmp_path, 2, identities=ROWS)
    moved = {"model__model_path": "/mnt/other", "train_dataset__path": "/mnt/rows.parquet"}
    assert opened(settings(tmp_path, **moved), ROWS).notes == ()
    other = {**ROWS, "train_dataset": {"rows": 41, "digest": "ef"}}
    with pytest.raises(ConfigError, match=r"what train_dataset holds: 40 rows \(digest ab\) -> 41 rows \(digest ef\)"):
        opened(settings(tmp_path), other)
    assert opened(settings(tmp_path, **moved)).checkpoint is not None  # not noted: not compared


def test_a_used_row_of_a_large_dataset_that_changed_is_named(tmp_path: Path):
    """Red when a sample of the rows is compared alone: the question of row 1 was altered in silence."""
    rows = [Task(id=f"train/{index}", index=index, row=Row(question=f"q {index}")) for index in range(3000)]
    identities = {"train_dataset": rows_identity(rows)}
    path = begun(tmp_path, 2, identities=identities)
    with Journal(path / "run.db") as journal:
        journal.add(Group(id="step-0/train/1", task=rows[1], version=0, rollouts=()))

    def notes(now: list[Task]) -> tuple[str, ...]:
        with open_run_directory(settings(tmp_path), None, {"train_dataset": rows_identity(now)}, now) as directory:
            return directory.notes

    assert notes(rows) == ()
    altered = [*rows[:1], replace(rows[1], row=Row(question="other")), *rows[2:]]
    assert rows_identity(altered) == identities["train_dataset"], "not one of the rows that the digest covers"
    (note,) = notes(altered)
    assert "train/1" in note


class Counted(list[Task]):
    """Rows that count how often one is read."""

    read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.read += 1
        return super().__getitem__(index)


def test_of_used_rows_with_images_only_some_are_read_again(tmp_path: Path):
    """Red when all are: each resume decoded every image that the run had used."""
    rows = Counted(Task(id=f"train/{at}", index=at, row=Row(question=f"q {at}", image=b"x")) for at in range(300))
    with Journal(tmp_path / "run.db") as journal:
        for row in list(rows):
            journal.add(Group(id=f"step-0/{row.id}", task=row, version=0, rollouts=()))
    rows.read = 0
    assert changed_rows(tmp_path / "run.db", rows) == []
    assert 100 <= rows.read <= 102
    rows[0] = replace(rows[0], row=Row(question="other", image=b"x"))
    assert changed_rows(tmp_path / "run.db", rows) == ["train/0"]
    rows[0] = replace(rows[0], row=Row(question="q 0", image=b"other"))
    assert changed_rows(tmp_path / "run.db", rows) == ["train/0"]


def test_functions_are_known_by_file_and_name_as_far_as_they_have_one(tmp_path: Path):
    begun(tmp_path, 2, workflow="here/agent.py:run_agent")
    assert opened(settings(tmp_path, workflow="/there/agent.py:run_agent")).notes == ()
    with pytest.raises(ConfigError, match=r"workflow: '/there/agent.py:run_agent' -> 'agent.py:other'"):
        opened(settings(tmp_path, workflow="agent.py:other"))
    assert opened(settings(tmp_path)).notes == ()


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path):
    """Settings that came since had their default; those that went are not compared."""
    path = begun(tmp_path, 2)
    entries = json.loads((path / "resolved.json").read_text())
    del entries["sampling.replay_share"]
    entries["loss.of_old"] = {"value": 3, "origin": "run.yaml"}
    (path / "resolved.json").write_text(json.dumps(entries))
    assert opened(settings(tmp_path)).notes == ()
    (path / "resolved.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=r"sampling.replay_share: 0.0 -> 0.5"):
        opened(settings(tmp_path, sampling__replay_share=0.5))
    (path / "resolved.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*resolved.json"):
        opened(settings(tmp_path))
    (path / "resolved.json").unlink()
    assert "resolved.json is missing" in opened(settings(tmp_path)).notes[0]


def test_formats_and_protocols_of_the_users_are_known_by_their_code(tmp_path: Path):
    """Ours have none; the same code elsewhere is the same, and two protocols in the other order are not."""
    form, other = tmp_path / "form.py", tmp_path / "other.py"
    form.write_text("MINE = 1\n")
    other.write_text("MINE = 2\n")

    def found(tool: str | None, *protocols: str) -> Mapping[str, Identity]:
        model = {"model_path": "m", "max_model_len": 8, "tool_call_parser": tool, "reasoning_parser": "qwen3"}
        judge = {**model, "reasoning_parser": f"{form}:MINE"}
        config = {"train_dataset": {"path": "d"}, "model": model, "auxiliary_models": {"judge": judge}}
        return parts_identities(RunConfig.model_validate({**config, "gateway": {"protocols": protocols}}))

    assert found("hermes").keys() == {"auxiliary_models.judge.reasoning_parser"}
    mine = found(f"{form}:MINE", f"{form}:MINE", f"{other}:MINE")
    assert mine["model.tool_call_parser"]["bytes"] == 9
    assert mine["gateway.protocols"]["bytes"] == 18
    assert found(None, f"{other}:MINE", f"{form}:MINE")["gateway.protocols"] != mine["gateway.protocols"]
    moved = form.rename(tmp_path / "moved.py")
    form.write_text("MINE = 3\n")
    assert found(f"{moved}:MINE")["model.tool_call_parser"] == mine["model.tool_call_parser"]


def test_identities_tell_other_content_and_know_the_same_elsewhere(toy_model_dir: Path, tmp_path: Path):
    rows = [Task(id=str(index), index=index, row=Row(question=f"q {index}", image=b"x")) for index in range(3000)]
    found = rows_identity(rows)
    assert found == rows_identity([replace(row, id="other") for row in rows])
    assert found["rows"] == 3000
    assert found != rows_identity([*rows[:-1], replace(rows[-1], row=Row(question="q", image=b"x"))])
    assert found != rows_identity(rows[:-1])
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in toy_model_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert model_identity(copy) == model_identity(toy_model_dir)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert model_identity(copy) != model_identity(toy_model_dir)
