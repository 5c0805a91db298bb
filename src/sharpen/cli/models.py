"""`sharpen models`: which families of models can be served and trained; `sharpen models PATH`: whether one can.

In: the command line. Out: the table of `models.support`, or an answer about one checkpoint, of which `config.json`
alone is read. Exit code 1: it cannot be served and trained here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sharpen.cli.arguments import add_json, print_json, say

_PARTS = {"engine": "embedded engine", "trainer": "trainer", "LoRA": "LoRA", "vllm": "vLLM as the engine"}


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model", nargs="?", metavar="PATH", help="a model's folder, or its name on the hub; without it, all families"
    )
    parser.add_argument(
        "--family", action="append", default=[], metavar="NAME", help="a family of your own, as `families` names it"
    )
    add_json(parser)


def run_models(arguments: argparse.Namespace) -> int:
    """Print the families, or what one checkpoint can do here."""
    from sharpen.models.table import bring

    bring(*arguments.family)
    if arguments.model is None:
        _print_families(as_json=arguments.json)
        return 0
    from sharpen.models.support import support_of

    found = support_of(_read_config(arguments.model))
    if arguments.json:
        print_json(found)
    else:
        _print_one(arguments.model, found)
    return 1 if found["missing"]["trainer"] or found["missing"]["engine"] else 0


def _print_families(*, as_json: bool) -> None:
    from sharpen.models.support import COLUMNS, row_of
    from sharpen.models.table import FAMILIES

    rows = [row_of(family) for family in FAMILIES]
    if as_json:
        print_json([dict(zip(COLUMNS, row, strict=True)) for row in rows])
        return
    for row in rows:
        cells = dict(zip(COLUMNS, row, strict=True))
        say(f"{cells['family']} ({cells['model types']})")
        say(", ".join(f"{name}: {cells[name]}" for name in ("engine", "trainer", "LoRA", "images", "vLLM")))
        say(f"  {cells[COLUMNS[-1]]}\n" if cells[COLUMNS[-1]] else "")


def _read_config(model: str) -> Any:
    """Return the configuration of a checkpoint. Raises `ModelError`."""
    from sharpen.errors import ModelError
    from sharpen.models.configuration import read_config

    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{model!r} has no config.json: it must be a Hugging Face model directory")
    try:
        return read_config(folder if folder.is_dir() else model, repr(model))
    except ModelError as error:
        raise ModelError(f"{error}{_meant(model)}") from error


def _meant(model: str) -> str:
    """Return what was meant by a name that is none: a folder, or a family of the table, which is no model itself."""
    from difflib import get_close_matches

    from sharpen.files import near_path
    from sharpen.models.table import FAMILIES

    names = {word.strip().lower(): family for family in FAMILIES for word in (*family.name.split(","), *family.types)}
    near = get_close_matches(model.lower(), names, n=1)
    if Path(model).expanduser().exists() or not near:
        return near_path(model)
    family = names[near[0]].name
    return f"; {family} is a family: give the folder of one of its models, or its name on the hub, as owner/name"


def _print_one(model: str, found: dict[str, Any]) -> None:
    known = "" if found["in_the_table"] else "; not in the table: engine and trainer compare it with transformers first"
    say(f"{model}: {found['family']} (model type {found['model_type']!r}{known})")
    say(f"needs beside plain attention: {', '.join(found['needs']) or 'nothing'}")
    for part, name in _PARTS.items():
        missing = found["missing"][part]
        say(f"{name}: {f'no, {missing}' if missing else 'yes'}")
    if found["images"]:
        say(f"images: {found['images']}")
    if found["kernels_not_installed"]:
        names = ", ".join(found["kernels_not_installed"])
        say(f"not installed: {names}; these layers are computed by transformers' slower torch code")
    for limit in found["limits"]:
        say(limit)
