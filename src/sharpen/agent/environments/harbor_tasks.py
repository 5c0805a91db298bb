"""Task folders of Harbor, read without its package: `task.toml`, `instruction.md`, `environment/`, `tests/`.

In: a folder of tasks, or of one. Out: `HarborTask`s, or a `DatasetError` that names the folder and what to do. Read are
`task.toml` of version 1.0 (`version`, `memory = "2G"`) to 1.4 (`schema_version`, `memory_mb`, a verifier with an
environment of its own). Harbor passes over names that it does not know; here they are refused, and so is what a task
needs and does not get. Which names there are, and their defaults: `harbor/models/task/config.py` of harbor 0.26.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field, model_validator

from sharpen.config.doors import folder_digest
from sharpen.config.public import Strict
from sharpen.errors import ConfigError, DatasetError

CONFIG, INSTRUCTION = "task.toml", "instruction.md"
TEST = "test.sh"
ARTIFACTS = "/logs/artifacts"
"""What a verifier with an environment of its own gets of the agent's, beside the `artifacts` that the task names."""
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"([0-9.]+)([GMK])B?", re.IGNORECASE)
_MB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_LEFT_OUT = "leave the task out by environment.args.leave_out"
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


class _Phase(Strict):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class _Place(Strict):
    """`[environment]`, and `[verifier.environment]`."""

    docker_image: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0)
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: float | None = Field(default=None, gt=0)
    storage_mb: float | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Any = None
    mcp_servers: list[Any] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: Any = None
    workdir: str | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_older_names(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        new = {name: value for name, value in data.items() if name not in ("memory", "storage", "allow_internet")}
        for name in ("memory", "storage"):
            if name in data:
                new.setdefault(f"{name}_mb", _megabytes(data[name]))
        if data.get("allow_internet") is False:
            new.setdefault("network_mode", "no-network")
        return new


class _Verifier(_Phase):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _Place | None = None
    collect: list[Any] = Field(default_factory=list)


class _Artifact(Strict):
    source: str
    destination: str | None = None
    exclude: list[str] = Field(default_factory=list)
    service: str | None = None


class _Solution(Strict):
    env: dict[str, str] = Field(default_factory=dict)


class _TaskFile(Strict):
    """`task.toml`."""

    schema_version: str = "1.4"
    version: str | None = None
    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: _Verifier = _Verifier()
    agent: _Phase = _Phase()
    environment: _Place = _Place()
    solution: _Solution = _Solution()
    source: str | None = None
    multi_step_reward_strategy: str | None = None
    steps: list[Any] | None = None
    artifacts: list[str | _Artifact] = Field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a container is made of: an `image` by name, or the `folder` with its Dockerfile; and how it runs.

    `build_s` bounds the making of the image. `memory_mb` and `cpus` are None where there is no bound.
    """

    image: str | None
    folder: Path
    workdir: str | None
    env: Mapping[str, str]
    network: bool
    memory_mb: float | None
    cpus: float | None
    build_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task. `agent_s` and `verifier_s` are the seconds that both have (None: no limit). `separate` is the place of
    tests that do not run in the agent's; `brings_tests` says that its image has them at `/tests`."""

    name: str
    folder: Path
    instruction: str
    digest: str
    place: Place
    agent_s: float | None
    agent_user: str | None
    verifier_s: float
    verifier_user: str | None
    verifier_env: Mapping[str, str]
    separate: Place | None
    brings_tests: bool
    artifacts: tuple[str, ...]

    @property
    def tests(self) -> Path:
        """The folder that becomes `/tests`."""
        return self.folder / "tests"


def read_tasks(folder: Path, leave_out: Sequence[str] = ()) -> list[HarborTask]:
    """Return the tasks of a folder by name, without those whose folder or name matches a pattern of `leave_out`.

    The folder holds a folder for each task, or is one itself. Raises `DatasetError`.
    """
    if not folder.is_dir():
        raise DatasetError(f"environment.id is {str(folder)!r}: there is no such folder of Harbor's tasks")
    marks = (CONFIG, INSTRUCTION, "task.yaml")
    if any((folder / mark).is_file() for mark in marks):
        places = [folder]
    else:
        places = [path for path in sorted(folder.iterdir()) if any((path / mark).is_file() for mark in marks)]
    places = [path for path in places if not any(fnmatch(path.name, pattern) for pattern in leave_out)]
    tasks: dict[str, HarborTask] = {}
    for place in places:
        task = read_task(place)
        if any(fnmatch(task.name, pattern) for pattern in leave_out):
            continue
        if task.name in tasks:
            raise DatasetError(
                f"two tasks have the name {task.name!r}, in {tasks[task.name].folder} and {place}: give one another "
                f"name in [task] of {CONFIG}, or {_LEFT_OUT}"
            )
        tasks[task.name] = task
    if not tasks:
        raise DatasetError(f"{folder} has no folder with a {CONFIG} of Harbor that is not left out")
    return [tasks[name] for name in sorted(tasks)]


def read_task(folder: Path) -> HarborTask:
    """Return the task of one folder. Raises `DatasetError`."""
    file = _read(folder)
    if not (folder / INSTRUCTION).is_file():
        raise DatasetError(f"{folder} has no {INSTRUCTION}, the text that the agent is given: write it, or {_LEFT_OUT}")
    instruction = _without_canary((folder / INSTRUCTION).read_text(encoding="utf-8")).strip()
    if not instruction:
        raise DatasetError(f"{folder / INSTRUCTION} is empty: write what the agent is to do, or {_LEFT_OUT}")
    verifier = file.verifier
    mode = verifier.environment_mode or ("separate" if verifier.environment else "shared")
    if mode == "shared" and verifier.environment is not None:
        raise DatasetError(f"{folder / CONFIG}: a shared verifier has no [verifier.environment]: remove one of the two")
    place = _place(folder, folder / "environment", file.environment, file.agent)
    separate, brings_tests = None, False
    if mode == "separate":
        separate, brings_tests = _separate(folder, file)
    if not brings_tests and not (folder / "tests" / TEST).is_file():
        raise DatasetError(f"{folder} has no tests/{TEST}, which gives the reward: write it, or {_LEFT_OUT}")
    return HarborTask(
        name=_name(folder, file),
        folder=folder.resolve(),
        instruction=instruction,
        digest=folder_digest(folder),
        place=place,
        agent_s=file.agent.timeout_sec,
        agent_user=_user(file.agent),
        verifier_s=verifier.timeout_sec,
        verifier_user=_user(verifier),
        verifier_env=_resolved(folder, verifier.env),
        separate=separate,
        brings_tests=brings_tests,
        artifacts=(ARTIFACTS, *_artifacts(folder, file)) if separate else (),
    )


def _read(folder: Path) -> _TaskFile:
    path = folder / CONFIG
    if not path.is_file():
        older = (folder / "task.yaml").is_file()
        way = "`harbor task migrate` makes one of task.yaml" if older else "write one, which may be empty"
        raise DatasetError(f"{folder} has no {CONFIG}: {way}, or {_LEFT_OUT}")
    try:
        file = _TaskFile(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} is not TOML: {error}: correct it, or {_LEFT_OUT}") from error
    except (ConfigError, TypeError, ValueError) as error:
        said = str(error).replace("_TaskFile: ", "")
        raise DatasetError(f"{path}: {said}: correct it, or {_LEFT_OUT}") from error
    wants = {
        "steps": file.steps,
        "environment.mcp_servers": file.environment.mcp_servers,
        "environment.skills_dir": file.environment.skills_dir,
        "environment.healthcheck": file.environment.healthcheck,
        "environment.gpus": file.environment.gpus,
        "environment.tpu": file.environment.tpu,
        "verifier.collect": file.verifier.collect,
    }
    for name, value in wants.items():
        if value:
            raise DatasetError(f"{path} has {name}, which tasks do not get here: {_LEFT_OUT}, or remove it")
    if file.environment.os.lower() != "linux":
        raise DatasetError(
            f"{path}: os in [environment] is {file.environment.os!r}, and tasks run on Linux: {_LEFT_OUT}"
        )
    return file


def _name(folder: Path, file: _TaskFile) -> str:
    name = file.task.get("name", folder.resolve().name)
    if not isinstance(name, str) or not name:
        raise DatasetError(f"{folder / CONFIG}: task.name must be a text like 'org/name', got {name!r}")
    return name


def _place(folder: Path, context: Path, place: _Place, phase: _Phase) -> Place:
    for name in _COMPOSE:
        if (context / name).is_file():
            raise DatasetError(f"{context / name}: a task has one container here, and no {name}: {_LEFT_OUT}")
    if place.docker_image is None and not (context / "Dockerfile").is_file():
        raise DatasetError(f"{context} has no Dockerfile, and {CONFIG} names no docker_image in [environment]: add one")
    mode = phase.network_mode or place.network_mode or "public"
    if mode not in ("public", "no-network"):
        raise DatasetError(
            f"{folder / CONFIG}: network_mode is {mode!r}, but here a task has the whole network ('public') or none "
            f"('no-network'): change it, or {_LEFT_OUT}"
        )
    return Place(
        image=place.docker_image,
        folder=context.resolve(),
        workdir=place.workdir,
        env=_resolved(folder, place.env),
        network=mode == "public",
        memory_mb=place.memory_mb,
        cpus=place.cpus,
        build_s=place.build_timeout_sec,
    )


def _separate(folder: Path, file: _TaskFile) -> tuple[Place, bool]:
    """Return the place of a verifier of its own, and whether its image has the tests: that of
    `[verifier.environment]`, that of `tests/Dockerfile`, or the agent's, made anew."""
    own, tests = file.verifier.environment or file.environment, folder / "tests"
    if file.verifier.environment is not None and own.docker_image is not None:
        return _place(folder, tests, own, file.verifier), True
    if any((tests / name).is_file() for name in ("Dockerfile", *_COMPOSE)):
        return _place(folder, tests, own.model_copy(update={"docker_image": None}), file.verifier), True
    image = file.environment.docker_image
    return _place(folder, folder / "environment", own.model_copy(update={"docker_image": image}), file.verifier), False


def _artifacts(folder: Path, file: _TaskFile) -> list[str]:
    found = []
    for artifact in file.artifacts:
        entry = _Artifact(source=artifact) if isinstance(artifact, str) else artifact
        path = PurePosixPath(entry.source)
        if entry.exclude or entry.service not in (None, "main") or not path.is_absolute() or ".." in path.parts:
            raise DatasetError(
                f"{folder / CONFIG}: artifacts are whole paths like /app/out of the one container, got {artifact!r}: "
                f"{_LEFT_OUT}"
            )
        found.append(str(path))
    return found


def _user(phase: _Phase) -> str | None:
    return None if phase.user is None else str(phase.user)


def _resolved(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with those of this machine in place of `${NAME}` and `${NAME:-default}`."""
    found = {}
    for name, value in variables.items():
        match = _VARIABLE.fullmatch(value)
        if match is not None:
            given = os.environ.get(match[1], match[2])
            if given is None:
                raise DatasetError(f"{folder / CONFIG} needs the variable {match[1]}: set it, or {_LEFT_OUT}")
            value = given
        found[name] = value
    return found


def _megabytes(size: Any) -> float:
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ValueError(f"a size is written like '2G' or '512M', got {size!r}")
    return float(match[1]) * _MB[match[2].upper()]


def _without_canary(text: str) -> str:
    """Return an instruction without the lines at its top by which a benchmark's texts are found again."""
    lines = text.split("\n")
    while lines and (_CANARY.match(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines)
