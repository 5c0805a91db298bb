#!/usr/bin/env python3
"""A Podman whose containers are root folders: the same command line, for sessions of several commands.

It keeps images and containers in the folder $FAKE_PODMAN, with a line of `log` for each command line. In place of a
container's processes it has those of each `exec`, which end with it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from sharpen.agent.sandbox.command import Command, Lifeline, Limits
from sharpen.agent.sandbox.root import Recipe, RootSession, read_recipe
from sharpen.errors import CommandError

FOLDER = Path(os.environ.get("FAKE_PODMAN", "."))
VALUES = {"--name", "--workdir", "--user", "--env", "--network", "--memory", "--cpus", "--tag"}
PLAIN = "plain:1"


def options_of(words: list[str]) -> dict[str, list[str]]:
    """Take the options from the front of a command line."""
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        name = words.pop(0)
        options.setdefault(name, []).append(words.pop(0) if name in VALUES else "")
    return options


def fail(text: str, status: int = 125) -> NoReturn:
    print(f"Error: {text}", file=sys.stderr)
    sys.exit(status)


def image_of(name: str) -> tuple[Recipe, Path]:
    path = FOLDER / f"{name.replace('/', '_')}.image"
    if name == PLAIN:
        return Recipe(folder="/app"), FOLDER
    if not path.exists():
        fail(f"{name}: image not known")
    return read_recipe(Path(path.read_text()) / "Dockerfile"), Path(path.read_text())


def session_of(name: str) -> RootSession:
    path = FOLDER / f"{name}.json"
    if not path.exists():
        fail(f'no container with name or ID "{name}" found: no such container')
    kept = json.loads(path.read_text())
    return RootSession(**{**kept, "place": Path(kept["place"]), "life": Lifeline()})


def run(words: list[str]) -> None:
    options = options_of(words)
    name = options["--name"][0]
    recipe, context = image_of(words[0])
    session = RootSession.start(recipe=recipe, context=context, network=options.get("--network") != ["none"])
    kept = {field: getattr(session, field) for field in RootSession.__slots__ if field != "life"}
    place = FOLDER / f"{name}.json"
    place.with_suffix(".new").write_text(json.dumps({**kept, "place": str(session.place)}))
    place.with_suffix(".new").rename(place)
    while not (FOLDER / f"{name}.rm").exists():
        time.sleep(0.01)


def remove(words: list[str]) -> None:
    path = FOLDER / f"{words[-1]}.json"
    (FOLDER / f"{words[-1]}.rm").touch()
    if path.exists():
        session_of(words[-1]).close()
        path.unlink()


def execute(words: list[str]) -> None:
    options = options_of(words)
    name, *command = words
    given = [text.partition("=") for text in options.get("--env", ())]
    environment = {key: value if mark else os.environ[key] for key, mark, value in given}
    session = session_of(name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work").mkdir()
        order = Command(arguments=tuple(command), root=Path(folder), environment=environment, limits=Limits())
        try:
            ended = session.run(order, Lifeline())
        except CommandError:
            fail(f"crun: executable file `{command[0]}` not found in $PATH: No such file or directory", 127)
    sys.stdout.write(ended.stdout)
    sys.stderr.write(ended.stderr)
    sys.exit(ended.exit_code if ended.exit_code >= 0 else 128 - ended.exit_code)


def copy(source: str, target: str) -> None:
    if target.startswith("sharpen-"):
        name, _, path = target.partition(":")
        session_of(name).put(Path(source.removesuffix("/.")), path)
        return
    name, _, path = source.partition(":")
    if not session_of(name).get(path, Path(target)):
        fail(f"{path!r} could not be found on container {name}")


def main() -> None:
    verb, *words = sys.argv[1:]
    with (FOLDER / "log").open("a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    if verb == "run":
        run(words)
    elif verb == "exec":
        execute(words)
    elif verb == "rm":
        remove(words)
    elif verb == "cp":
        copy(*words)
    elif verb == "build":
        tag = options_of(words)["--tag"][0]
        read_recipe(Path(words[0]) / "Dockerfile")
        (FOLDER / f"{tag}.image").write_text(words[0])
    elif verb == "image":
        sys.exit(0 if (FOLDER / f"{words[1]}.image").exists() else 1)
    elif verb != "ps":
        fail(f"unknown command {verb}")


if __name__ == "__main__":
    main()
