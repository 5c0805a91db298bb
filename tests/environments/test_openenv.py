"""OpenEnv as its package is: real servers, in this process, in one of their own, and by address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sharpen.agent.environments.openenv import OpenEnv, _in_process
from sharpen.agent.environments.opening import environment_identity
from sharpen.agent.rollout.attempt import is_connection_error
from sharpen.agent.rollout.places import causes
from sharpen.config.public import EnvironmentConfig, WorkflowOutput
from sharpen.errors import ConfigError, RolloutError
from sharpen.testing import check_environment
from sharpen.testing.environments import served_replies

SERVER = '''
import os
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Told(Observation):
    hint: str = ""
    tries: int = 0


class Higher(Environment[Guess, Told, State]):
    """A number from 0 to 9, the seed's last digit. Reward 1 for it, 0.25 for each hint that helped."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, most=3, **kwargs):
        self.number, self.left, self.tries = (seed or 0) % 10, most, 0
        return Told(hint=f"guess a number, {self.left} tries")

    def step(self, action, timeout_s=None, **kwargs):
        if action.guess == "die":
            os._exit(1)
        if action.guess == "mute":
            return Told(hint="")
        self.tries += 1
        guess = int(action.guess) if action.guess.isdigit() else -1
        right, over = guess == self.number, self.tries == self.left
        hint = "right" if right else "higher" if guess < self.number else "lower"
        return Told(hint=hint, tries=self.tries, reward=1.0 if right else 0.25, done=right or over)

    @property
    def state(self):
        return State()


class Adder(MCPEnvironment):
    """Two tools, of which one ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adder")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"question": f"what is {seed} + 1?"})

    async def step_async(self, action, timeout_s=None, **kwargs):
        found = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and found.error is None:
            found.reward, found.done = 1.0, True
        return found

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


app = create_fastapi_app(Higher, Guess, Told, max_concurrent_envs=8)
tools = create_fastapi_app(Adder, CallToolAction, CallToolObservation, max_concurrent_envs=8)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("openenv") / "toy_server.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture(scope="module")
def address(file: str) -> Iterator[str]:
    server = _in_process(f"{file}:app")
    yield server.address
    server.close()


def config(id_: str, **args: Any) -> EnvironmentConfig:
    return EnvironmentConfig(type="openenv", id=id_, args=args, train_tasks=3, held_out_tasks=2)


def play(environment: OpenEnv, model: Any, task: int = 0) -> WorkflowOutput:
    async def attempt() -> WorkflowOutput:
        return await environment.workflow(task=dict(environment.tasks("train")[task]), model=model)

    return asyncio.run(attempt())


def guess(environment: OpenEnv, replies: Sequence[str]) -> tuple[WorkflowOutput, list[Any]]:
    with served_replies(replies) as (model, requests):
        return play(environment, model), requests


def metrics(*, steps: int, wrong: int = 0, truncated: float = 0.0) -> dict[str, float]:
    return {"steps": steps, "replies_that_are_no_action": wrong, "truncated": truncated}


def test_an_episode_by_address_with_the_one_field_of_text(address: str) -> None:
    """Seed 2: after 0 and 1 the answer."""
    environment = OpenEnv(config(address))
    found, requests = guess(environment, ["0", "1", "2"])
    assert found == WorkflowOutput(reward=1.5, metrics=metrics(steps=3))
    assert [message["content"] for message in requests[-1]["messages"]] == [
        "guess a number, 3 tries", "0", "higher", "1", "higher",
    ]  # fmt: skip
    lost, _ = guess(OpenEnv(config(address, reset={"most": 2}, observation="hint", action="guess")), ["9"])
    assert lost.reward == 0.5
    cut, _ = guess(OpenEnv(config(address.replace("http", "ws"), max_turns=1)), ["9"])
    assert cut.metrics == metrics(steps=1, truncated=1.0)
    check_environment(OpenEnv, config(address), ["2"])


def test_a_server_in_this_process_ends_with_the_environment(file: str) -> None:
    environment = OpenEnv(config(f"{file}:app"))
    assert guess(environment, ["2"])[0].reward == 1.0
    environment.close()
    with pytest.raises(RolloutError, match="of OpenEnv failed"):
        guess(environment, ["2"])


def test_a_server_that_dies_in_mid_rollout_is_said(file: str) -> None:
    """And it is nobody's fault, so that an evaluation leaves the task out. Red while the client's error counts as the
    workflow's: then it would be a 0 of the model."""
    environment = OpenEnv(config(f"{file}:app", process=True))
    with pytest.raises(RolloutError, match=r"toy_server.py:app of OpenEnv failed: \w+.*start it again") as caught:
        guess(environment, ["0", "die"])
    assert any(map(is_connection_error, causes(caught.value)))
    environment.close()


def test_a_function_and_a_mute_observation(address: str, tmp_path: Path) -> None:
    functions = tmp_path / "words.py"
    functions.write_text("def number(text):\n    return {'guess': {'two': '2', 'none': None}.get(text, text)}\n")
    environment = OpenEnv(config(address, action=f"{functions}:number"))
    assert guess(environment, ["two"])[0].reward == 1.0
    found, requests = guess(environment, ["none", "two"])
    assert (found.reward, found.metrics) == (1.0, metrics(steps=1, wrong=1)), "a reply that the server cannot read"
    told = requests[1]["messages"][-1]["content"]
    assert told == "That is no action: the server does not understand it"
    with pytest.raises(RolloutError, match="gave the player no text, but '': correct"):
        guess(environment, ["mute"])


class Caller:
    """A model that calls tools, as the openai package has its answers."""

    name = "scripted"

    def __init__(self, *calls: tuple[str, str] | str) -> None:
        self._calls, self.requests = list(calls), []  # type: ignore[var-annotated]
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=self))

    async def create(self, **request: Any) -> Any:
        from openai.types.chat import ChatCompletionMessage

        self.requests.append(json.loads(json.dumps(request)))
        said = self._calls.pop(0)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if isinstance(said, str):
            message["content"] = said
        else:
            function = {"name": said[0], "arguments": said[1]}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        return SimpleNamespace(choices=[SimpleNamespace(message=ChatCompletionMessage(**message))])


def test_tools_of_a_server_are_the_models(file: str) -> None:
    environment = OpenEnv(config(f"{file}:tools"))
    model = Caller(("add", "{broken"), ("nothing", "{}"), ("add", '{"a": 2, "b": 1}'))
    found = play(environment, model)
    assert found == WorkflowOutput(reward=1.0, metrics={"steps": 2, "truncated": 0.0})
    (tool,) = model.requests[0]["tools"]
    assert tool["function"]["name"] == "add"
    assert tool["function"]["description"] == "Add two numbers."
    assert sorted(tool["function"]["parameters"]["properties"]) == ["a", "b"]
    assert model.requests[0]["messages"] == [{"role": "user", "content": "what is 2 + 1?"}]
    said = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert said[0].startswith("error: the arguments are no JSON")
    assert "nothing" in said[1]
    silent = play(environment, Caller("I know it: 3"))
    assert silent == WorkflowOutput(reward=0.0, metrics={"steps": 0, "truncated": 0.0})
    environment.close()


def test_what_its_own_command_writes_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`openenv init`: the one environment in its package, unchanged. It says again what it is told and never ends; the
    reward is a tenth for each letter, at most 1. It takes one session at a time."""
    subprocess.run(["openenv", "init", "echo_env"], cwd=tmp_path, check=True, capture_output=True, env=tool_path())
    monkeypatch.chdir(tmp_path)
    environment = OpenEnv(config("echo_env.server.app:app", max_turns=2))
    found, requests = guess(environment, ["hello", "sharpened pencils"])
    assert found == WorkflowOutput(reward=1.5, metrics=metrics(steps=2, truncated=1.0))
    assert [one["content"] for one in requests[1]["messages"]] == ["Echo Env environment ready!", "hello", "hello"]
    environment.close()


def tool_path() -> dict[str, str]:
    """Where the commands of the packages that are tested lie; without `uv`, which would ask a registry."""
    return {**os.environ, "PATH": str(Path(sys.executable).parent)}


@pytest.mark.parametrize(
    ("id_", "args", "message"),
    [
        ("ftp://here", {}, "begins with http, https, ws or wss"),
        ("http://127.0.0.1:9", {}, "no server of OpenEnv answers at http://127.0.0.1:9/schema"),
        ("nothing.py:app", {}, "nothing.py"),
        (None, {}, "environment.id is missing"),
        ("address", {"colour": 1}, "has 'colour', but openenv has process, reset"),
        ("address", {"observation": "colour"}, "observation is 'colour', but the observations of .* have .*hint"),
    ],
)
def test_wrong_settings_are_refused(address: str, id_: str | None, args: dict[str, Any], message: str) -> None:
    given = EnvironmentConfig(type="openenv", id=address if id_ == "address" else id_, args=args)
    with pytest.raises(ConfigError, match=message):
        OpenEnv(given)


def test_the_code_of_a_server_is_recorded(
    address: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an application the package that it is in, or its file; of an address what it says of itself."""
    assert environment_identity(config(address)) == {"openenv": "0.10.0", "name": "Higher", "version": "1.0.0"}
    assert environment_identity(config(f"{file}:app"))["file"] == "toy_server.py"
    package = tmp_path / "game"
    (package / "server").mkdir(parents=True)
    for path, text in {
        "openenv.yaml": "",
        "models.py": "A = 1\n",
        "server/__init__.py": "",
        "server/app.py": "",
    }.items():
        (package / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    names = [f"{package}/server/app.py:app", "game.server.app:app"]
    before = [environment_identity(config(name)) for name in names]
    assert before[0] == before[1]
    (package / "models.py").write_text("A = 2\n")
    (package / "notes.md").write_text("not code")
    after = [environment_identity(config(name, process=True)) for name in names]
    assert after[0] == after[1] != before[0]
    assert {identity["package"] for identity in [*before, *after]} == {"game"}


@pytest.mark.parametrize("last", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"], ids=["end", "kill"])
def test_a_process_of_its_own_ends_with_the_run(last: str, file: str, tmp_path: Path) -> None:
    """Also with one that is killed. Red when the server is left running, or does not look at its input."""
    program = (
        "import sys\nfrom sharpen.agent.environments.opening import opened\nfrom sharpen import EnvironmentConfig\n"
        f"one = opened(EnvironmentConfig(type='openenv', id={f'{file}:app'!r}, args={{'process': True}}))\n"
        "print(one._server.address, flush=True)\n"
    )
    told = tmp_path / "told.txt"  # not a pipe, which a server that is left would hold open
    with told.open("w") as out:
        subprocess.run([sys.executable, "-c", program + last], stdout=out, cwd=tmp_path, check=not last)
    port = told.read_text().strip().rpartition(":")[2]
    assert int(port)
    until = time.monotonic() + 10
    while (running := _with(port)) and time.monotonic() < until:
        time.sleep(0.05)
    for path in running:
        os.kill(int(path.parent.name), signal.SIGKILL)
    assert not running


def _with(word: str) -> list[Path]:
    """The processes that have a word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in path.read_text().split("\0"):
                found.append(path)
    return found
