"""Who a judge asks, and how: for JSON of a schema, from an OpenAI-compatible endpoint or an auxiliary model of the run.

In: messages, a JSON schema. Out: a `Verdict` that keeps to the schema, with its tokens. Everything else that comes back
(prose, a refusal, a verdict that was cut) is a `JudgeError`, and so a failure of the judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sharpen.agent.rollout.choices import returned_text
from sharpen.errors import ConfigError, JudgeError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Field = str | Callable[[Mapping[str, Any]], str]
"""What of a task a judge is shown: a field of its row, or a function of the row."""
REASON = "reason"
"""The member of a verdict in which the model thinks before it grades."""
MAX_KEPT = 10_000
"""Verdicts that a `JudgeModel` keeps; then the oldest goes."""

_afresh: ContextVar[bool] = ContextVar("sharpen_judge_afresh", default=False)
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], AsyncOpenAI]] = WeakKeyDictionary()
"""The clients of each event loop: their connections belong to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the model answered: members by name, prompt plus sampled tokens (0 if it was `kept` from before)."""

    members: Mapping[str, Any]
    tokens: int
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeModel:
    """The model that a judge asks.

    Without `base_url`, `name` is an auxiliary model of the run (`docs/use/auxiliary-models.md`); with it, what the
    OpenAI-compatible endpoint calls the model, and `api_key_env` the environment variable that holds its key.
    `temperature` and `max_tokens` None leave both to the model's own settings. The same question is asked once: its
    verdict is kept, in this process.
    """

    name: str
    base_url: str | None = None
    api_key_env: str | None = None
    temperature: float | None = 0.0
    max_tokens: int | None = None
    _kept: dict[str, Verdict] = field(default_factory=dict, init=False, repr=False, compare=False)

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        schema: Mapping[str, Any],
        auxiliary_models: Mapping[str, Any] | None = None,
    ) -> Verdict:
        """Return the verdict. `schema` is that of an object with members that are texts or have an `enum`.

        Raises `JudgeError` if the model answers something else, `ConfigError` if it or its key is not there, and the
        openai package's errors, after its retries.
        """
        question = {"messages": list(messages), "response_format": _format(schema), **self._sampling()}
        key = hashlib.blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=16).hexdigest()
        if not _afresh.get() and (kept := self._kept.get(key)) is not None:
            return replace(kept, tokens=0, kept=True)
        client, name = self._client(auxiliary_models)
        completion = await client.chat.completions.create(model=name, **question)
        usage = getattr(completion, "usage", None)
        verdict = Verdict(
            members=_members(self.name, completion, schema), tokens=0 if usage is None else int(usage.total_tokens)
        )
        while len(self._kept) >= MAX_KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[key] = verdict
        return verdict

    def _sampling(self) -> dict[str, Any]:
        asked = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in asked.items() if value is not None}

    def _client(self, auxiliary_models: Mapping[str, Any] | None) -> tuple[Any, str]:
        """Return a client and what it calls the model."""
        if self.base_url is not None:
            return _client_of(self.base_url, self._key()), self.name
        if not auxiliary_models or self.name not in auxiliary_models:
            there = ", ".join(auxiliary_models or ()) or "none"
            raise ConfigError(
                f"a judge asks the auxiliary model {self.name!r}, but there is {there}: name it in auxiliary_models, "
                "or give JudgeModel the base_url of an endpoint"
            )
        model = auxiliary_models[self.name]
        return model.client, model.name

    def _key(self) -> str:
        if self.api_key_env is None:
            return "none"
        if not (key := os.environ.get(self.api_key_env)):
            raise ConfigError(
                f"the environment variable {self.api_key_env} is not set: it holds the key of the judge {self.name!r}"
            )
        return key


@contextlib.contextmanager
def asking_afresh() -> Iterator[None]:
    """Within the block models are asked although a verdict was kept: to see how far a judge's verdicts scatter."""
    token = _afresh.set(True)
    try:
        yield
    finally:
        _afresh.reset(token)


async def close_clients() -> None:
    """Close the connections to endpoints of the event loop that this runs on, which is about to end."""
    for client in _clients.pop(asyncio.get_running_loop(), {}).values():
        await client.close()


def schema_of(members: Mapping[str, Sequence[Any]], *, reason: bool) -> dict[str, Any]:
    """Return the schema of a verdict: each member one of its values, after a `reason` if there is to be one."""
    properties: dict[str, Any] = {REASON: {"type": "string"}} if reason else {}
    for name, values in members.items():
        kind = "string" if isinstance(values[0], str) else "integer"
        properties[name] = {"type": kind, "enum": list(values)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def shown(task: Mapping[str, Any], what: Field) -> str:
    """Return the text that a judge is shown of a task."""
    return str(what(task) if callable(what) else task[what])


def text_of(response: Any) -> str:
    """Return the text of what the workflow returned. Raises `JudgeError` if it has none."""
    if (text := returned_text(response)) is None:
        raise JudgeError(
            f"a judge got a {type(response).__name__} as response: return the answer's text as "
            "WorkflowOutput(response=...)"
        )
    return text


def _format(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema, "strict": True}}


def _client_of(base_url: str, key: str) -> AsyncOpenAI:
    from openai import AsyncOpenAI

    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    if (base_url, key) not in clients:
        clients[base_url, key] = AsyncOpenAI(base_url=base_url, api_key=key)
    return clients[base_url, key]


def _members(name: str, completion: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict in a completion. Raises `JudgeError` if there is none."""
    choice = completion.choices[0]
    text = choice.message.content or ""
    if choice.finish_reason == "length":
        raise JudgeError(
            f"the judge {name!r} was cut at its token limit before its verdict was whole: raise its max_tokens, or ask "
            f"without a reason; it ends with {text[-80:]!r}"
        )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    wanted = schema["properties"]
    if not isinstance(found, dict) or not all(_fits(found.get(one), wanted[one]) for one in wanted):
        raise JudgeError(
            f"the judge {name!r} answered no verdict with {', '.join(wanted)}, but {text[:120]!r}: its endpoint must "
            "keep to response_format json_schema"
        )
    return {one: found[one] for one in wanted}


def _fits(value: Any, wanted: Mapping[str, Any]) -> bool:
    if "enum" in wanted:
        return not isinstance(value, bool | list | dict) and value in wanted["enum"]
    return isinstance(value, str)
