"""`sharpen export RUN --for sft --to FILE`: what was recorded, as rows that others read; the model, as a file or on the
hub.

In: a recording or a run. Out: a JSONL or Parquet file and what was left out; a GGUF file; a repository.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.cli.arguments import add_json, add_run, number, print_json, run_of, say
from sharpen.errors import ConfigError, JournalError, ModelError

if TYPE_CHECKING:
    from sharpen.serve.record.rows import LeftOut, Opinion

PURPOSES: Mapping[str, str] = {
    "sft": "rows for algorithm_type sft",
    "dpo": "rows for algorithm_type dpo",
    "datasets": "every rollout with messages, reward, thumb and note",
    "atif": "trajectories for Harbor and what reads its format",
    "openenv": "calls with their token ids, by OpenEnv's contract",
    "otel": "spans of OpenTelemetry, as OTLP JSON",
    "gguf": "the model, by llama.cpp's converter",
    "hub": "the model, to the Hugging Face hub",
}


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument(
        "--for",
        dest="purpose",
        required=True,
        choices=tuple(PURPOSES),
        help="; ".join(f"{name}: {what}" for name, what in PURPOSES.items()),
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="FILE",
        help="the file to write (.jsonl, .parquet, .gguf); atif, openenv, otel: or a new folder; hub: owner/name",
    )
    parser.add_argument(
        "--min-reward",
        type=number,
        metavar="R",
        help="sft: only rollouts with at least this reward (required if they differ, since sft learns every answer)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="gguf, hub: the trained model even if the verdict does not recommend it; gguf: over a file that is there",
    )
    add_json(parser)


def run_export(arguments: argparse.Namespace) -> int:
    """Write what was asked for. Raises `ConfigError` if there is nothing, or it cannot be written."""
    run_dir = run_of(arguments)
    if arguments.purpose != "sft" and arguments.min_reward is not None:
        more = ": dpo compares higher rewards with lower ones" if arguments.purpose == "dpo" else ""
        raise ConfigError(f"--min-reward is for sft{more}")
    if arguments.force and arguments.purpose not in ("gguf", "hub"):
        raise ConfigError(f"--force is for gguf and hub: for {arguments.purpose} there is nothing to force")
    if arguments.purpose in ("gguf", "hub"):
        return _export_model(arguments, run_dir)
    if arguments.purpose in ("atif", "openenv", "otel"):
        return _export_documents(arguments, run_dir)
    return _export_rows(arguments, run_dir)


def _export_rows(arguments: argparse.Namespace, run_dir: Path) -> int:
    from sharpen.learning.experience.reading import read_groups
    from sharpen.serve.record.rows import LeftOut, by_reward, dpo_rows, rollout_rows, sft_rows, write_rows

    path = Path(arguments.to)
    left_out, groups = LeftOut(), read_groups(_journal(run_dir))
    rows: list[dict[str, Any]]
    if arguments.purpose == "sft":
        rows = list(sft_rows(groups, arguments.min_reward, left_out))
        if arguments.min_reward is None:
            _check_alike(left_out)
    elif arguments.purpose == "dpo":
        rows = list(dpo_rows(groups, left_out))
    else:
        rows = list(rollout_rows(groups, _opinions(run_dir), left_out))
    if not rows:
        raise ConfigError("; ".join([f"{run_dir} has nothing for {arguments.purpose}", *left_out.lines()]))
    try:
        write_rows(path, rows)
    except OSError as error:
        raise ConfigError(f"--to {path} cannot be written: {error.strerror}") from error
    rewards = Counter(row["reward"] for row in rows) if arguments.purpose == "datasets" else left_out.taught
    least, most = _range(rewards)
    if arguments.json:
        found = {"min": least, "max": most, "without": rewards[None]}
        print_json({"rows": len(rows), "file": str(path), "rewards": found, "left_out": list(left_out.lines())})
        return 0
    say(f"{len(rows)} rows for {arguments.purpose} in {path}")
    if arguments.purpose != "dpo":  # whose rows have a higher reward and a lower one
        say(f"{'rows' if arguments.purpose == 'datasets' else 'answers'} by reward: {by_reward(rewards)}")
    for line in left_out.lines():
        say(line)
    return 0


def _export_documents(arguments: argparse.Namespace, run_dir: Path) -> int:
    """Write trajectories as other programs read them."""
    from sharpen.learning.experience.reading import read_groups
    from sharpen.serve.interchange import atif, openenv, otel
    from sharpen.serve.interchange.files import write_documents
    from sharpen.serve.record.rows import LeftOut

    made = {"atif": atif.documents, "openenv": openenv.documents, "otel": otel.documents}[arguments.purpose]
    left_out, path = LeftOut(), Path(arguments.to)
    try:
        number = write_documents(path, made(read_groups(_journal(run_dir)), left_out))
    except JournalError:
        raise
    except OSError as error:
        raise ConfigError(f"--to {path} cannot be written: {error.strerror}") from error
    if not number:
        raise ConfigError("; ".join([f"{run_dir} has nothing for {arguments.purpose}", *left_out.lines()]))
    if arguments.json:
        print_json({"documents": number, "to": str(path), "left_out": list(left_out.lines())})
        return 0
    say(f"{number} documents for {arguments.purpose} in {path}")
    for line in left_out.lines():
        say(line)
    return 0


def _journal(run_dir: Path) -> Path:
    if not (run_dir / "run.db").exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no run.db")
    return run_dir / "run.db"


def _range(rewards: Mapping[float | None, int]) -> tuple[float | None, float | None]:
    known = [reward for reward in rewards if reward is not None]
    return min(known, default=None), max(known, default=None)


def _check_alike(left_out: LeftOut) -> None:
    """Raise `ConfigError` if answers of different rewards would be taught alike, and nobody asked for it."""
    from sharpen.serve.record.rows import by_reward

    least, most = _range(left_out.taught)
    if least != most:
        raise ConfigError(
            f"the answers differ in reward ({by_reward(left_out.taught)}), and sft teaches every one as an example to "
            f"follow: give the least that is good enough (--min-reward={most} for the best alone, --min-reward={least} "
            "for all that have one)"
        )


def _opinions(run_dir: Path) -> dict[str, Opinion]:
    """Return the thumbs and notes of `sharpen view` on rollouts of the training."""
    from sharpen.serve.record.rows import Opinion
    from sharpen.show.view.notes import read_notes

    notes = [note for note in read_notes(run_dir).values() if note.source == "run.db"]
    return {note.rollout: Opinion(thumb=note.thumb, text=note.text) for note in sorted(notes, key=lambda n: n.time)}


def _not_in_gguf(model: Path) -> str:
    """Return what of a model its GGUF file has not, as a sentence, or ""."""
    from sharpen.models.pieces import towers_in
    from sharpen.serve.record.model_export import CONVERTER

    towers = " and ".join(towers_in(model))
    return towers and (
        f"the model has {towers}, which is not in the file: llama.cpp reads towers from a second one, which "
        f"{CONVERTER} --mmproj {model} makes of those that it knows"
    )


def _model_of(run_dir: Path, *, force: bool) -> Path:
    """Return the model that the verdict recommends; where it recommends none, with `force` the best checkpoint, or the
    latest. Raises `ConfigError`."""
    from sharpen.learning.trainer.checkpoint import best_of_run
    from sharpen.serve.record.model_export import chosen_model

    try:
        return chosen_model(run_dir)
    except ConfigError as error:
        try:
            trained = best_of_run(run_dir)
        except ModelError:
            trained = None
        if trained is None:
            raise
        if not force:
            raise ConfigError(f"{error}; --force exports {trained.name} all the same") from error
        say(f"sharpen: {error}; exported all the same (--force): {trained.name}", file=sys.stderr)
        return trained


def _export_model(arguments: argparse.Namespace, run_dir: Path) -> int:
    from sharpen.serve.record.model_export import to_gguf, to_hub

    model = _model_of(run_dir, force=arguments.force)
    place, left_out = arguments.to, ""
    if arguments.purpose == "gguf":
        to_gguf(model, Path(place), replace=arguments.force)
        left_out = _not_in_gguf(model)
    else:
        place = to_hub(model, place)
    if arguments.json:
        print_json({"model": str(model), "to": place, "left_out": [left_out] if left_out else []})
    else:
        say(f"{model} is in {place}")
        if left_out:
            say(left_out)
    return 0
