"""AgentScope's model objects around ours: what the user's code receives where it uses AgentScope.

In: one of our model objects (`ChatModel`, `Endpoint`: `name`, `api_key`, `client`, `sync_client`, `base_url`).
Out: an instance of the `OpenAIChatModel` of the AgentScope that is imported in this process, around our client, that
has our object's attributes too. Without AgentScope: our object itself.

AgentScope counts as imported when `sys.modules` holds it at the moment the model is handed to the user's code. It is
never imported from here.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import sys
from abc import ABC
from typing import Any

from sharpen.errors import ConfigError

OLDEST = {1: (1, 0, 4), 2: (2, 0, 3)}
"""The oldest release of each line whose model object is known to take what we give it."""
TESTED = "1.0.4, 1.0.21 and 2.0.10"


def present(model: Any) -> Any:
    """What a workflow or judge receives for `model`: see the module. Raises `ConfigError` for an unsupported version.

    The object does not stream, has no sampling settings of its own (the session's apply) and does not retry. Copies,
    deep ones too, share the client.
    """
    line = imported_line()
    if line is None or isinstance(model, _Presentation):
        return model
    shown = _around_1(model) if line == 1 else _around_2(model)
    shown.client = model.client
    return shown


def imported_line() -> int | None:
    """1 or 2 for the AgentScope that is imported in this process, None if none is.

    Raises `ConfigError` if it is a version that we have no model object for.
    """
    version = getattr(sys.modules.get("agentscope"), "__version__", None)
    if version is None:
        return None
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    found = (int(numbers[1]), int(numbers[2]), int(numbers[3])) if numbers else (0, 0, 0)
    if found < OLDEST.get(found[0], (sys.maxsize,)):
        lines = " and ".join(f"{'.'.join(map(str, oldest))} up to {line}.x" for line, oldest in OLDEST.items())
        raise ConfigError(
            f"agentscope {version} is imported, but Sharpen makes model objects for {lines} (tested: {TESTED}): "
            "install one of these, or do not import agentscope and use model.client"
        )
    return found[0]


class TrinityChatModel(ABC):  # noqa: B024 - it has no methods: it only stands for those that have ours
    """Names the `model` argument of a workflow, as AgentScope's first tuner did: for annotations and `isinstance`.

    What a workflow receives is made by Sharpen, with and without AgentScope; nobody constructs it.
    """

    def __new__(cls, *_: Any, **__: Any) -> TrinityChatModel:
        raise TypeError("TrinityChatModel is only a name for what a workflow receives as `model`: do not construct it")

    @classmethod
    def __subclasshook__(cls, other: type, /) -> bool:
        return issubclass(other, _Presentation) or (hasattr(other, "client") and hasattr(other, "sync_client"))


class _Presentation:
    """Put before AgentScope's class: what AgentScope's object lacks is looked up on ours."""

    sharpen_model: Any
    """Our own model object."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "sharpen_model":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.sharpen_model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Presentation:
        twin = memo[id(self)] = object.__new__(type(self))
        shared = {"client", "sharpen_model", "client_kwargs"}
        for name, value in vars(self).items():
            twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        return twin

    def __repr__(self) -> str:
        return f"OpenAIChatModel around {self.sharpen_model!r}"


@functools.cache
def _class(base: type) -> Any:
    """A subclass of AgentScope's model class, under the same name."""
    return type(base.__name__, (_Presentation, base), {"__module__": __name__, "__doc__": _Presentation.__doc__})


def _around_1(model: Any) -> Any:
    kind = importlib.import_module("agentscope.model").OpenAIChatModel
    of_client = (
        "client_kwargs" if "client_kwargs" in inspect.signature(kind).parameters else "client_args"
    )  # till 1.0.9
    shown = _class(kind)(model_name=model.name, api_key=model.api_key, stream=False, **{of_client: _placeholder()})
    shown.sharpen_model = model
    return shown


def _around_2(model: Any) -> Any:
    agentscope = importlib.import_module("agentscope.model")
    credential = importlib.import_module("agentscope.credential").OpenAICredential(api_key=model.api_key)
    shown = _class(agentscope.OpenAIChatModel)(
        credential=credential,
        model=model.name,
        stream=False,
        max_retries=0,  # a call that is made again would be recorded twice
        client_kwargs=_placeholder(),
    )
    shown.sharpen_model = model
    return shown


@functools.cache
def _placeholder() -> dict[str, Any]:
    """Arguments of the client that AgentScope makes before ours replaces it: one transport for all, since a new one
    costs some 10 ms (it reads certificates). It answers nothing.
    """
    httpx = importlib.import_module("httpx")

    def refuse(request: Any) -> Any:
        raise httpx.ConnectError("Sharpen's client was not put in place", request=request)

    return {"http_client": httpx.AsyncClient(transport=httpx.MockTransport(refuse), trust_env=False)}
