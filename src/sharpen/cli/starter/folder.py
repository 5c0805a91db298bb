"""Writes a starter: a folder with an agent, a judge, tasks, `run.yaml`, a test and a page that says what each is.

In: a folder, the framework of the agent, the model to train. Out: the files that were written. What is in the folder
already is never overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sharpen.cli.starter.tasks import rows
from sharpen.errors import ConfigError

FRAMEWORKS = ("openai", "tools", "langgraph", "agentscope", "command")
TINY = "model"
"""Where the tiny model is, seen from the folder."""
_FILES = Path(__file__).with_name("files")


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """A written folder. `requirements` are the packages that its agent needs beside Sharpen."""

    folder: Path
    files: tuple[str, ...]
    requirements: tuple[str, ...]


def write_starter(folder: Path, framework: str, model: str | None) -> Starter:
    """Write the files. `model` is a folder or a name on the hub; None: the tiny model, which is made elsewhere. Raises
    `ConfigError` if any of the files is there already."""
    contents = dict(_contents(framework, model))
    try:
        there = [name for name in contents if (folder / name).exists()]
        if there:
            raise ConfigError(
                f"{folder} already has {', '.join(there)}; nothing was written: name a new folder, or remove these"
            )
        for name, text in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; name another folder") from error
    requirements = contents.get("requirements.txt", "").split()
    return Starter(folder=folder, files=tuple(contents), requirements=tuple(requirements))


def variant(framework: str) -> str:
    """Return the name of the framework's files: AgentScope has two lines, and the installed one decides."""
    if framework != "agentscope":
        return framework
    try:
        return "agentscope1" if version("agentscope").startswith("1.") else "agentscope2"
    except PackageNotFoundError:
        return "agentscope2"


def _contents(framework: str, model: str | None) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file."""
    for part in (variant(framework), "common"):
        for path in sorted((_FILES / part).glob("*.*")):
            if path.name != "run.yaml":
                yield path.name, path.read_text(encoding="utf-8")
    for split, tasks in rows().items():
        yield f"tasks/{split}.jsonl", "".join(f"{json.dumps(row)}\n" for row in tasks)
    yield "run.yaml", _settings(model)


def _settings(model: str | None) -> str:
    """Return `run.yaml`: as it is for the tiny model, with values for a real model otherwise."""
    text = (_FILES / "common" / "run.yaml").read_text(encoding="utf-8")
    if model is None:
        return text
    for tiny, real in (
        (f"model_path: {TINY} ", f"model_path: {json.dumps(model)} "),
        ("max_model_len: 256", "max_model_len: 4096"),
        ("max_tokens: 16", "max_tokens: 512"),
        ("learning_rate: 3.0e-4", "learning_rate: 1.0e-6"),
    ):
        assert text.count(tiny) == 1, tiny
        text = text.replace(tiny, real)
    return text
