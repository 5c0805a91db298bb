"""What to do about an exception of user code, where its own words do not say it.

In: the exception, and the outcome that it led to. Out: a hint in brackets, to stand behind the error; empty if there is
nothing to add.
"""

from __future__ import annotations

import inspect
from typing import Any

from sharpen.agent.rollout.places import causes
from sharpen.config.secrets import hide
from sharpen.types import Outcome

_CLIENTS = frozenset({"openai", "anthropic", "httpx", "httpcore", "aiohttp", "requests", "urllib3"})


def hint(error: BaseException, outcome: Outcome) -> str:
    """Return what to do about an exception of user code."""
    found = list(causes(error))
    for cause in found:
        if isinstance(cause, AttributeError | TypeError):
            text = str(cause)
            if "coroutine" in text:
                return " [an `await` is missing: this is a coroutine, not its result]"
            if "can't be used in 'await' expression" in text:
                return " [this is no async call: leave its `await` out, or call it on model.client]"
    if outcome == Outcome.INFRASTRUCTURE:
        refused = next((cause for cause in found if _is_a_clients(cause)), None)
        if refused is not None:
            return (
                f" [no server answered{_place(refused)}: an agent that asks the model there needs a client with "
                "base_url=model.base_url and api_key=model.api_key]"
            )
    return ""


def hint_of_model(outcome: Outcome) -> str:
    """Return what to do about a failure that the model caused."""
    if outcome != Outcome.CONTEXT_OVERFLOW:
        return ""
    return " [model.max_model_len is the most tokens of prompt and answer: raise it, or make the prompt shorter]"


def forgotten_await(value: Any) -> str:
    """Return what to say of a value that should have been awaited, which is closed; empty if it is none."""
    if not inspect.isawaitable(value):
        return ""
    if inspect.iscoroutine(value):
        value.close()
    return f"an `await` is missing in front of what gave this {type(value).__name__}"


def _is_a_clients(error: BaseException) -> bool:
    """Whether an HTTP client could not connect; not a server that answered with an error."""
    packages = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    if getattr(error, "response", None) is not None:
        return False
    return isinstance(error, ConnectionRefusedError) or bool(packages & _CLIENTS)


def _place(error: BaseException) -> str:
    """Return where a client wanted to connect to, as ` at URL`; empty if it does not say."""
    try:
        url = str(getattr(error, "request").url)  # noqa: B009 - httpx raises where there is none
    except Exception:
        return ""
    return f" at {hide(url[:200])}"
