"""Writes a starter: a folder with an agent, a judge, tasks, `run.yaml`, a test and a page that says what each is.

In: a folder, the framework of the agent, the model to train. Out: the files that were written. What is in the folder
already is never overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from sharpen.cli.starter.tasks import rows
from sharpen.errors import ConfigError

if TYPE_CHECKING:
    from sharpen.config.public import EnvironmentConfig

FRAMEWORKS = ("openai", "tools", "langgraph", "agentscope", "command")
TINY = "model"
"""Where the tiny model is, seen from the folder."""
_FILES = Path(__file__).with_name("files")
_REAL = (
    (f"model_path: {TINY} ", "model_path: {model} "),
    ("max_tokens: 16", "max_tokens: 512"),
    ("learning_rate: 3.0e-4", "learning_rate: 1.0e-6"),
)
"""What a real model has in place of the tiny one's values, `max_model_len` beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """A written folder. `requirements` are the packages that its agent needs beside Sharpen."""

    folder: Path
    files: tuple[str, ...]
    requirements: tuple[str, ...]


def write_starter(folder: Path, framework: str, model: str | None) -> Starter:
    """Write the files. `model` is a folder or a name on the hub; None: the tiny model, which is made elsewhere. Raises
    `ConfigError` if any of the files is there already."""
    return _write(folder, dict(_contents(framework, model)))


def write_environment(folder: Path, environment: EnvironmentConfig, model: str | None) -> Starter:
    """Write the files of a folder whose tasks, workflow and judge are an environment's; see `write_starter`."""
    from sharpen.agent.environments.environment import REQUIREMENTS

    text = (_FILES / "environment" / "run.yaml").read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if model is None or "system_prompt" not in line]
    if not environment.args:
        kept = [line for line in kept if "_tasks:" not in line]
    text = "\n".join([*kept, ""])
    for name, value in (("TYPE", environment.type), ("ID", environment.id), ("ARGS", environment.args)):
        text = text.replace(f": {name}\n", f": {json.dumps(value)}\n")
    text = text.replace(": PROMPT\n", f": {json.dumps(environment.system_prompt)}\n")
    contents = {
        "run.yaml": text if model is None else _for_real(text, model, "max_model_len: 512"),
        "README.md": (_FILES / "environment" / "README.md").read_text(encoding="utf-8"),
    }
    if environment.type in REQUIREMENTS:
        contents["requirements.txt"] = f"{REQUIREMENTS[environment.type]}\n"
    return _write(folder, contents)


def _write(folder: Path, contents: Mapping[str, str]) -> Starter:
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
    return text if model is None else _for_real(text, model, "max_model_len: 256")


def _for_real(text: str, model: str, length: str) -> str:
    for tiny, real in (*_REAL, (length, "max_model_len: 4096")):
        assert text.count(tiny) == 1, tiny
        text = text.replace(tiny, real.replace("{model}", json.dumps(model)))
    return text
