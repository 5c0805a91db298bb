"""Task folders of Harbor: an agent works in a container of the task, then the task's tests run there and score it.

In: `id`, a folder of tasks; `args`, see `Arguments`. Out: a row for each task; a workflow in which an agent works
(ours, which runs commands by a tool; a command; a function of yours) and the tests give rewards; a judge that reads
them. A rollout has a session of its own (`sharpen.agent.sandbox.command.Session`), which ends with it. Tests are copied
into it when the agent is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from sharpen.agent.environments.environment import TEST, TRAIN
from sharpen.agent.environments.games import arguments_of
from sharpen.agent.environments.harbor_tasks import HarborTask, Place, read_tasks
from sharpen.agent.sandbox.command import Sandbox, Session
from sharpen.agent.sandbox.commands import CommandResult, Commands, Request, in_thread
from sharpen.agent.sandbox.container import PROGRAMS, ContainerSession
from sharpen.agent.sandbox.root import PROGRAMS as PROGRAM_FOLDERS
from sharpen.agent.sandbox.root import Recipe, RootSession, check_namespaces, read_recipe
from sharpen.agent.tasks.order import hold_out
from sharpen.config.doors import code_identity, folder_digest
from sharpen.config.functions import import_function
from sharpen.config.public import EnvironmentConfig, JudgeOutput, Strict, WorkflowOutput
from sharpen.errors import ConfigError, DatasetError, JudgeError, SandboxError

TIMED_OUT, COMMANDS = "agent_timed_out", "commands"
"""Metrics: whether the agent was ended at its time limit; the commands that our agent ran."""
ROOT = "root"
REWARD = "reward"
SYSTEM_PROMPT = "You work in a Linux machine by the tool bash. When the task is done, answer without calling it."
_PLACEHOLDER = "{instruction}"
_LOGS = "/logs/verifier"
_OUTPUT_BYTES = 8000
"""What our agent is shown of a command's output, and of its errors."""
_SAID_LINES = 5
_SHARE, _AT_MOST = 0.1, 512
"""Tasks that are held out where the settings do not say how many."""
_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command by bash, in the task's folder each time. Files stay.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_building = threading.Lock()


class Arguments(Strict):
    """`environment.args`.

    `sandbox`: `docker`, `podman`, or a path to one (None: the first that is found), or `root`: a root folder with this
    machine's programs, or with those of the folder `root`. `network`: the containers' network. `agent`: None is ours;
    a list is a command with `{instruction}` in it; `file.py:function` is `async def f(instruction, model, session)`.
    `agent_folder` is copied to `/agent`. `agent_timeout_s` takes the place of the tasks' own. `max_turns` is of our
    agent. `reward` is the name of the one that trains, of several. `leave_out` holds patterns of tasks' names.
    `held_out` is a folder of other tasks to hold out.
    """

    sandbox: str | None = None
    root: str = "/"
    network: str | None = None
    agent: str | list[str] | None = None
    agent_folder: str | None = None
    agent_timeout_s: float | None = Field(default=None, gt=0)
    max_turns: int = Field(default=50, ge=1)
    reward: str = REWARD
    leave_out: list[str] = Field(default_factory=list)
    held_out: str | None = None


class Harbor:
    """The tasks of a folder."""

    def __init__(self, config: EnvironmentConfig) -> None:
        if config.id is None:
            raise ConfigError("environment.id is missing: a folder of Harbor's tasks")
        self._given, self._args = config, arguments(config)
        tasks = read_tasks(Path(config.id), self._args.leave_out)
        self._splits = self._split(tasks)
        self._tasks = {task.name: task for those in self._splits.values() for task in those}
        self._function = self._agent_function()
        self._client = _client(self._args.sandbox)
        self._recipes: dict[Path, Recipe] = {}
        for task in self._tasks.values():
            self._check(task)

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return a row for each task: its instruction, its name, and a digest of its folder."""
        return [
            {"question": task.instruction, "name": task.name, "digest": task.digest} for task in self._splits[split]
        ]

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Let the agent work on a task, then the tests. The response is what they said, for the judge."""
        known = self._tasks[task["name"]]
        commands = Commands(lambda _: {})
        try:
            async with _opened(lambda: self._start(known.place)) as session:
                metrics = await self._work(known, model, session, commands)
                if known.separate is None:
                    response = await self._tested(known, session, commands)
                else:
                    response = await self._tested_elsewhere(known, known.separate, session, commands)
        finally:
            commands.remove()
        return WorkflowOutput(response=response, metrics=metrics)

    async def judge(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        """Return the rewards that the tests gave. Raises `JudgeError` if they gave none."""
        if not isinstance(response, Mapping) or "rewards" not in response:
            raise JudgeError(
                "the tests of a task run in the agent's session: name an agent in environment.args.agent in place of "
                "a workflow of your own"
            )
        if problem := response["problem"]:
            raise JudgeError(f"the tests of {task['name']} {problem}")
        rewards = dict(response["rewards"])
        if (chosen := self._args.reward) not in rewards:
            if len(rewards) != 1 or chosen != REWARD:
                raise JudgeError(
                    f"the tests of {task['name']} gave the rewards {', '.join(rewards) or 'none'}, and not {chosen!r}: "
                    "name one of them in environment.args.reward"
                )
            (chosen,) = rewards
        return JudgeOutput(reward=rewards.pop(chosen), metrics=rewards)

    def close(self) -> None:
        """Do nothing: each rollout closes its own session."""

    async def _work(self, task: HarborTask, model: Any, session: Session, commands: Commands) -> dict[str, float]:
        """Let the agent work until it is done, or its time is over."""
        if self._args.agent_folder is not None:
            folder = Path(self._args.agent_folder)
            await asyncio.to_thread(session.put, folder, "/agent")
        agent = session.as_user(task.agent_user)
        limit = self._args.agent_timeout_s or task.agent_s
        if isinstance(self._args.agent, list):
            words = [word.replace(_PLACEHOLDER, task.instruction) for word in self._args.agent]
            ended = await model.run(words, sandbox=agent, env=task.place.env, timeout_s=limit)
            return {TIMED_OUT: float(ended.timed_out), "exit_code": float(ended.exit_code)}
        metrics: dict[str, float] = {TIMED_OUT: 0.0}
        try:
            async with asyncio.timeout(limit):
                if self._function is not None:
                    await self._function(task.instruction, model, session)
                else:
                    await self._converse(task, model, agent, commands, metrics)
        except TimeoutError:
            metrics[TIMED_OUT] = 1.0
        return metrics

    async def _converse(
        self, task: HarborTask, model: Any, sandbox: Sandbox, commands: Commands, metrics: dict[str, float]
    ) -> None:
        """Our agent: the model runs commands until it calls no more."""
        system = SYSTEM_PROMPT if self._given.system_prompt is None else self._given.system_prompt
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": task.instruction})
        metrics[COMMANDS] = 0.0
        for _ in range(self._args.max_turns):
            reply = await model.client.chat.completions.create(model=model.name, messages=messages, tools=[_BASH])
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                said = arguments_of(call)
                command = said.get("command") if isinstance(said, dict) else None
                if isinstance(command, str) and call.function.name == "bash":
                    metrics[COMMANDS] += 1
                    said = await self._ran(command, task, sandbox, commands)
                elif isinstance(said, dict):
                    said = f"error: the one tool is bash, with a command, got {call.function.name} with {said}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})

    async def _ran(self, command: str, task: HarborTask, sandbox: Sandbox, commands: Commands) -> str:
        """Return what a command said, and its exit code where it failed."""
        if "\0" in command:
            return "error: a command has no character 0"
        arguments = ["bash", "-c", command]
        ended = await commands.run(
            Request(arguments=arguments, sandbox=sandbox, env=task.place.env, output_bytes=_OUTPUT_BYTES)
        )
        failed = f"exit code {ended.exit_code}" if ended.exit_code else ""
        return "\n".join(filter(None, [ended.stdout.rstrip(), ended.stderr.rstrip(), failed])) or "(no output)"

    async def _tested(
        self, task: HarborTask, session: Session, commands: Commands, *, place: Place | None = None
    ) -> dict[str, Any]:
        """Run the tests in a session, and return `rewards` by name and `problem`, why there are none, or empty."""
        if not (place is not None and task.brings_tests):
            await asyncio.to_thread(session.put, task.tests, "/tests")
        emptied = f"rm -rf {_LOGS} && mkdir -p {_LOGS} && chmod 777 {_LOGS} && chmod +x /tests/test.sh"
        prepared = await commands.run(Request(arguments=["sh", "-c", emptied], sandbox=session.as_user("0")))
        if prepared.exit_code:
            return _nothing(f"cannot begin: {_end_of(prepared)}")
        ended = await commands.run(
            Request(
                arguments=["sh", "-c", "exec /tests/test.sh 2>&1"],
                sandbox=session.as_user(task.verifier_user),
                env={**(place or task.place).env, **task.verifier_env},
                timeout_s=task.verifier_s,
            )
        )
        if ended.timed_out:
            return _nothing(f"did not end within {task.verifier_s:g} s (verifier.timeout_sec): {_end_of(ended)}")
        with tempfile.TemporaryDirectory(prefix="sharpen-reward-") as folder:
            return await asyncio.to_thread(_rewards, session, Path(folder), ended)

    async def _tested_elsewhere(
        self, task: HarborTask, place: Place, session: Session, commands: Commands
    ) -> dict[str, Any]:
        """Run the tests in a session of their own, with what the agent left at the task's `artifacts`."""
        with tempfile.TemporaryDirectory(prefix="sharpen-artifacts-") as folder:
            taken = {path: Path(folder) / str(at) for at, path in enumerate(task.artifacts)}
            left = {path: kept for path, kept in taken.items() if await asyncio.to_thread(session.get, path, kept)}
            await asyncio.to_thread(session.close)
            async with _opened(lambda: self._start(place)) as own:
                for path, kept in left.items():
                    await asyncio.to_thread(own.put, kept, path)
                return await self._tested(task, own, commands, place=place)

    def _start(self, place: Place) -> Session:
        """Start a session. Blocks. Raises `SandboxError`."""
        if self._client is None:
            recipe = Recipe() if place.image is not None else self._recipes[place.folder]
            return RootSession.start(
                recipe=recipe,
                context=place.folder,
                root=Path(self._args.root),
                workdir=place.workdir,
                network=place.network,
                memory_mb=place.memory_mb,
            )
        options = [] if place.memory_mb is None else ["--memory", f"{int(place.memory_mb)}m"]
        options += [] if place.cpus is None else ["--cpus", f"{place.cpus:g}"]
        return ContainerSession.start(
            image=place.image or _built(self._client, place),
            client=self._client,
            workdir=place.workdir,
            network=self._args.network if place.network else "none",
            options=options,
        )

    def _split(self, tasks: list[HarborTask]) -> dict[str, list[HarborTask]]:
        given = self._given
        if self._args.held_out is not None:
            training, held_out = tasks, read_tasks(Path(self._args.held_out))
            if both := {task.name for task in training} & {task.name for task in held_out}:
                raise DatasetError(f"the task {min(both)!r} is in environment.id and in args.held_out: keep one")
            held_out = held_out[: given.held_out_tasks]
        else:
            share, at_most = (_SHARE, _AT_MOST) if given.held_out_tasks is None else (1.0, given.held_out_tasks)
            training, held_out = hold_out(tasks, given.seed, share, at_most)
        if not (training and held_out):
            raise DatasetError(
                f"{given.id} has {len(tasks)} tasks, of which {len(training)} train and {len(held_out)} are held out: "
                "add tasks (three at least), lower environment.held_out_tasks, or name a folder in args.held_out"
            )
        return {TRAIN: training[: given.train_tasks], TEST: held_out}

    def _agent_function(self) -> Callable[..., Any] | None:
        agent = self._args.agent
        if isinstance(agent, str):
            return import_function(agent)
        if agent is not None and not any(_PLACEHOLDER in word for word in agent):
            raise ConfigError(f"environment.args.agent is {agent}: one of its words must hold {_PLACEHOLDER}")
        folder = self._args.agent_folder
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"environment.args.agent_folder is {folder!r}: there is no such folder")
        return None

    def _check(self, task: HarborTask) -> None:
        """Raise `DatasetError` or `ConfigError` for a task that cannot be had here."""
        if self._args.agent is not None and not task.place.network:
            raise DatasetError(
                f"{task.folder} has no network, over which an agent in it would reach its model: leave "
                "environment.args.agent out, or the task by leave_out"
            )
        if self._client is not None:
            return
        if self._args.root == "/" and PROGRAM_FOLDERS.fullmatch(task.folder.parts[1]):
            raise DatasetError(
                f"{task.folder} would be seen by the agent, tests and all, since a root folder shows it "
                f"/{task.folder.parts[1]}: move the tasks elsewhere, or use docker or podman"
            )
        for place in filter(None, (task.place, task.separate)):
            if place.image is not None and self._args.root == "/":
                raise DatasetError(
                    f"{task.folder} is made of the image {place.image}, and environment.args.sandbox is 'root': name "
                    "a folder with its files in environment.args.root, or use docker or podman"
                )
            if place.image is None:
                self._recipes[place.folder] = read_recipe(place.folder / "Dockerfile")


def arguments(config: EnvironmentConfig) -> Arguments:
    """Return `environment.args`. Raises `ConfigError`."""
    try:
        return Arguments(**config.args)
    except ConfigError as error:
        raise ConfigError(f"environment.args of harbor: {str(error).removeprefix('Arguments: ')}") from error


def identity(config: EnvironmentConfig) -> dict[str, int | str]:
    """Return by what a run that goes on recognizes the agent: the digests of its folder, and of its function's file."""
    args, found = arguments(config), dict[str, int | str]()
    if args.agent_folder is not None:
        found["agent_folder"] = folder_digest(Path(args.agent_folder))
    if isinstance(args.agent, str):
        found |= code_identity(args.agent)
    return found


@contextlib.asynccontextmanager
async def _opened(start: Callable[[], Session]) -> AsyncIterator[Session]:
    """Start a session, and close it whatever happens, also if nobody waits for its start any more."""
    starting = in_thread(start)
    try:
        session = await asyncio.shield(asyncio.wrap_future(starting))
    except asyncio.CancelledError:
        starting.add_done_callback(lambda done: None if done.exception() else done.result().close())
        raise
    try:
        yield session
    finally:
        await asyncio.wrap_future(in_thread(session.close))


def _client(name: str | None) -> str | None:
    """Return the path of Docker or Podman; None for root folders. Raises `ConfigError` if it does not work here."""
    if name == ROOT:
        try:
            check_namespaces()
        except SandboxError as error:
            raise ConfigError(f"environment.args.sandbox is {ROOT!r}, but {error}") from error
        return None
    if name is not None and Path(name).name not in PROGRAMS:
        raise ConfigError(f"environment.args.sandbox is {name!r}: it must be docker, podman, a path to one, or {ROOT}")
    problems = []
    for one in [name] if name is not None else PROGRAMS:
        client = shutil.which(one)
        if client is None:
            problems.append(f"{one} is not in PATH")
            continue
        try:
            tried = subprocess.run([client, "ps"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"{client} does not work here ({error})")
            continue
        if tried.returncode == 0:
            return client
        problems.append(f"{client} does not work here ({' '.join(tried.stderr.split())})")
    raise ConfigError(
        f"{' and '.join(problems)}: start it, or environment.args.sandbox: {ROOT} takes programs of this machine"
    )


def _built(client: str, place: Place) -> str:
    """Return the name of the image of a folder with a Dockerfile, made where it is not there. Blocks. Raises
    `SandboxError`."""
    name = f"sharpen-harbor-{folder_digest(place.folder)}"
    with _building:
        there = subprocess.run([client, "image", "inspect", name], stdin=subprocess.DEVNULL, capture_output=True)
        if there.returncode == 0:
            return name
        try:
            made = subprocess.run(
                [client, "build", "--quiet", "--tag", name, str(place.folder)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=place.build_s,
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxError(
                f"the image of {place.folder} was not made within {place.build_s:g} s (its build_timeout_sec)"
            ) from error
    if made.returncode:
        raise SandboxError(f"the image of {place.folder} cannot be made: {made.stderr.strip()[-500:]}")
    return name


def _rewards(session: Session, folder: Path, ended: CommandResult) -> dict[str, Any]:
    """Read the rewards that the tests left: those of `reward.json`, else that of `reward.txt`."""
    for name in ("reward.json", "reward.txt"):
        place = folder / name
        if not session.get(f"{_LOGS}/{name}", place) or place.is_symlink() or not place.is_file():
            continue
        text = place.read_text(encoding="utf-8", errors="replace")
        try:
            found = json.loads(text) if name.endswith("json") else float(text)
        except ValueError:
            return _nothing(f"left {name} with {text[:80]!r}, which is no {'JSON' if name[-1] == 'n' else 'number'}")
        rewards = found if isinstance(found, dict) else {REWARD: found}
        for reward, value in rewards.items():
            if not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
                return _nothing(f"left {name} with {reward} {value!r}, which is not a finite number")
        return {"rewards": {str(reward): float(value) for reward, value in rewards.items()}, "problem": ""}
    return _nothing(f"left no reward in {_LOGS}/reward.txt or reward.json: {_end_of(ended)}")


def _nothing(problem: str) -> dict[str, Any]:
    return {"rewards": {}, "problem": problem}


def _end_of(ended: CommandResult) -> str:
    """Return the exit code of a command and its last lines."""
    last = "\n".join(f"{ended.stdout}\n{ended.stderr}".strip().splitlines()[-_SAID_LINES:])
    return f"exit code {ended.exit_code}, {last or 'and they said nothing'}"
