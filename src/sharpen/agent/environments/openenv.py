"""Servers of OpenEnv: by their address, or started here from an application.

In: `id`, an address, or an application as uvicorn takes it (`server/app.py:app`, `package.module:app`); `args`:
`process` (a process of its own for an application; else a thread of this one), `reset` (what `reset` takes beside the
seed), `observation` and `action` (the field of each that is text, or a function of yours, `game.py:function`),
`max_turns`. Out: a task for each seed; a workflow of one episode, whose reward is the sum of its rewards. The server's
own schemas say what an action is: where it calls tools, the model gets these, else its text is the action's one field
of text.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from sharpen.agent.environments.environment import TEST, import_package
from sharpen.agent.environments.games import Conversation, arguments_of, as_reward, as_text, seeds
from sharpen.config.doors import code_identity
from sharpen.config.functions import import_function, import_object
from sharpen.config.public import EnvironmentConfig, WorkflowOutput
from sharpen.errors import ConfigError, RolloutError

TYPE = "openenv"
STEPS, NO_ACTIONS, TRUNCATED = "steps", "replies_that_are_no_action", "truncated"
"""Metrics of an episode."""
_NO_ACTION = "(code: VALIDATION_ERROR)"
"""How the error of a server ends that cannot read an action."""
MAX_TURNS = 100
_KNOWN = ("process", "reset", "observation", "action", "max_turns")
_OF_ALL = ("done", "reward", "metadata")
"""The fields that every observation has."""
_START_S = 60.0
_WS = {"http": "ws", "https": "wss"}
_SERVE = """
import os, sys, threading, uvicorn
def end_with_the_run(): sys.stdin.read(); os._exit(0)
threading.Thread(target=end_with_the_run, daemon=True).start()
uvicorn.run(sys.argv[1], port=int(sys.argv[2]), log_level="warning")
"""
"""A server whose input ends when the process that started it does, also if that is killed."""


class OpenEnv:
    """A server; each rollout has a session of its own on it. How many it takes at a time is the server's to say
    (`rollout.max_concurrent_rollouts`)."""

    judge = None

    def __init__(self, config: EnvironmentConfig) -> None:
        import_package(TYPE, "openenv.core")
        self._client = import_package(TYPE, "openenv.core.generic_client").GenericEnvClient
        if config.id is None:
            raise ConfigError("environment.id is missing: the address of a server of OpenEnv, or an application")
        if wrong := sorted(config.args.keys() - set(_KNOWN)):
            raise ConfigError(f"environment.args has {wrong[0]!r}, but openenv has {', '.join(_KNOWN)}")
        self._config, self._max_turns = config, config.args.get("max_turns", MAX_TURNS)
        self._server = _serve(config.id, process=bool(config.args.get("process")))
        try:
            schema = _schema(self._server.address)
            self._calls_tools = "tool_name" in schema["action"].get("properties", {})
            if not self._calls_tools:
                self._act = self._function("action", schema["action"])
                self._told = self._function("observation", schema["observation"])
        except BaseException:
            self.close()
            raise

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return a row for each seed. What differs between seeds is the environment's to say."""
        return [
            {"question": f"{self._config.id}, seed {seed}", "seed": seed} for seed in seeds(self._config, split == TEST)
        ]

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Play an episode in a session of its own. A reply that is no action is answered with the reason, and takes one
        of the turns."""
        session = self._client(base_url=self._server.address)
        try:
            await self._asked(session.connect())
            return await (self._with_tools if self._calls_tools else self._in_text)(session, task, model)
        finally:
            with contextlib.suppress(Exception):  # of a server that is gone
                await session.close()

    async def _in_text(self, session: Any, task: Mapping[str, Any], model: Any) -> WorkflowOutput:
        player, steps, wrong = Conversation(model, self._config.system_prompt or ""), 0, 0
        result = await self._asked(self._reset(session, task))
        total, told = _reward(result, "the reset"), ""
        while not result.done and steps + wrong < self._max_turns:
            move = await player.reply(told or self._told(result.observation))
            try:
                result = await self._asked(session.step(self._act(move)))
            except (ValueError, RolloutError) as error:
                if isinstance(error, RolloutError) and not str(error.__cause__).endswith(_NO_ACTION):
                    raise
                why = error if isinstance(error, ValueError) else "the server does not understand it"
                wrong, told = wrong + 1, f"That is no action: {why}"  # in place of the observation
                continue
            steps, told = steps + 1, ""
            total += _reward(result, f"step {steps}")
        return WorkflowOutput(
            reward=total, metrics={STEPS: steps, NO_ACTIONS: wrong, TRUNCATED: float(not result.done)}
        )

    async def _with_tools(self, session: Any, task: Mapping[str, Any], model: Any) -> WorkflowOutput:
        tools = _as_tools(await self._asked(session.step({"type": "list_tools"})))
        result = await self._asked(self._reset(session, task))
        system, told = self._config.system_prompt, as_text(_all_text(result.observation))
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": told})
        total, steps, turns, calls = _reward(result, "the reset"), 0, 0, True
        while calls and not result.done and turns < self._max_turns:
            more = {"tools": tools} if tools else {}
            reply = await model.client.chat.completions.create(model=model.name, messages=messages, **more)
            message, turns = reply.choices[0].message, turns + 1
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                said: Any = arguments_of(call)
                if isinstance(said, dict):
                    action = {"type": "call_tool", "tool_name": call.function.name, "arguments": said}
                    result, steps = await self._asked(session.step(action)), steps + 1
                    total += _reward(result, f"step {steps}")
                    said = result.observation.get("error") or result.observation.get("result")
                content = said if isinstance(said, str) else json.dumps(said, default=str)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            calls = bool(message.tool_calls)
        cut_off = calls and not result.done
        return WorkflowOutput(reward=total, metrics={STEPS: steps, TRUNCATED: float(cut_off)})

    def _reset(self, session: Any, task: Mapping[str, Any]) -> Awaitable[Any]:
        begun: Awaitable[Any] = session.reset(seed=task["seed"], **self._config.args.get("reset", {}))
        return begun

    async def _asked(self, answer: Awaitable[Any]) -> Any:
        """Return what the server answers. Raises `RolloutError` if it fails or is gone."""
        try:
            return await answer
        except Exception as error:
            raise RolloutError(
                f"the server {self._config.id} of OpenEnv failed: {type(error).__name__}: {str(error)[:120]}: see "
                "its own log, and start it again if it is gone"
            ) from error

    def close(self) -> None:
        """End a server that was started here."""
        self._server.close()

    def _function(self, name: str, schema: Mapping[str, Any]) -> Callable[[Any], Any]:
        """Return what makes text of an observation, or an action of text: a function, or a field."""
        given = self._config.args.get(name)
        if given is not None and ":" in given:
            return import_function(given)
        fields = schema.get("properties", {})
        text = [field for field, kind in fields.items() if _is_text(kind) and field not in _OF_ALL]
        if given is None and len(text) != 1:
            raise ConfigError(
                f"the {name}s of {self._config.id} have {len(text)} fields of text ({', '.join(text) or 'none'}): "
                f"environment.args.{name} must name one of them, or a function of yours as game.py:function"
            )
        if given is not None and given not in fields:
            raise ConfigError(
                f"environment.args.{name} is {given!r}, but the {name}s of {self._config.id} have {', '.join(fields)}"
            )
        field = text[0] if given is None else given
        return (lambda said: {field: said}) if name == "action" else (lambda observation: observation.get(field))


def identity(config: EnvironmentConfig) -> dict[str, int | str]:
    """Return by what a run that goes on recognizes a server's code: that of an application which is served here, or
    what a server by its address says that it is, if it says so."""
    assert config.id is not None
    if "://" not in config.id:
        return code_identity(config.id)
    try:
        said = httpx.get(f"{_address(config.id)}/metadata", timeout=30.0).raise_for_status().json()
    except (httpx.HTTPError, ValueError):  # not every server has it
        return {}
    named = {name: said.get(name) for name in ("name", "version")} if isinstance(said, dict) else {}
    return {name: str(value) for name, value in named.items() if value}


class _Server:
    """A server and how it is ended."""

    def __init__(self, address: str, end: Callable[[], None]) -> None:
        self.address, self._end = address, end

    def close(self) -> None:
        end, self._end = self._end, lambda: None
        end()


def _serve(name: str, *, process: bool) -> _Server:
    """Return the server with an address, or one that serves an application. Raises `ConfigError`."""
    if "://" in name:
        return _Server(_address(name), lambda: None)
    return _in_process(name) if process else _in_thread(name)


def _address(name: str) -> str:
    """Return an address as HTTP takes it. Raises `ConfigError`."""
    scheme, _, rest = name.partition("://")
    if not rest or scheme not in {*_WS, *_WS.values()}:
        raise ConfigError(f"environment.id is {name!r}: the address of a server begins with http, https, ws or wss")
    return f"{'https' if scheme in ('https', 'wss') else 'http'}://{rest}".rstrip("/")


def _in_thread(name: str) -> _Server:
    import uvicorn

    application = import_object(name)
    server = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, name="openenv", daemon=True)
    thread.start()

    def end() -> None:
        server.should_exit = True
        thread.join(_START_S)

    until = time.monotonic() + _START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > until:
            end()
            raise ConfigError(f"the application {name} of OpenEnv does not start: see the lines above")
        time.sleep(0.01)
    return _Server(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", end)


def _in_process(name: str) -> _Server:
    place, _, attribute = name.partition(":")
    file = Path(place)
    module, folder = (file.stem, file.resolve().parent) if file.suffix == ".py" else (place, Path.cwd())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", _SERVE, f"{module}:{attribute}", str(port)]
    started = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE)

    def end() -> None:
        with started:  # closes its input, and waits
            started.terminate()
            try:
                started.wait(5)
            except subprocess.TimeoutExpired:
                started.kill()

    address, until = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{address}/health", timeout=1.0).is_success:
                return _Server(address, end)
        if started.poll() is not None or time.monotonic() > until:
            end()
            raise ConfigError(f"the application {name} of OpenEnv does not start: see the lines above")
        time.sleep(0.05)


def _schema(address: str) -> dict[str, Any]:
    """Ask a server what its actions and observations are. Raises `ConfigError`."""
    try:
        found: dict[str, Any] = httpx.get(f"{address}/schema", timeout=30.0).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(
            f"no server of OpenEnv answers at {address}/schema: {error or type(error).__name__}"
        ) from error
    if not isinstance(found, dict) or not {"action", "observation"} <= found.keys():
        raise ConfigError(f"{address}/schema is not that of a server of OpenEnv: it has no action and observation")
    return found


def _as_tools(result: Any) -> list[dict[str, Any]]:
    """Return the tools of a session, as a chat takes them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in result.observation.get("tools", ())
    ]


def _reward(result: Any, when: str) -> float:
    return 0.0 if result.reward is None else as_reward(result.reward, when)


def _all_text(observation: Mapping[str, Any]) -> str:
    """Return the text with which an environment of tools begins: of its fields, or of its metadata."""
    fields = {**(observation.get("metadata") or {}), **observation}
    return "\n".join(value for name, value in fields.items() if isinstance(value, str) and name not in _OF_ALL)


def _is_text(kind: Mapping[str, Any]) -> bool:
    return "string" in [kind.get("type"), *(one.get("type") for one in kind.get("anyOf", ()))]
