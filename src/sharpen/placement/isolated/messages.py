"""What a run and a worker process send each other, over a pair of sockets.

run ──Order──► worker: one attempt             run ◄──Ready, Done or Failed── worker
run ──Answer─► worker                          run ◄──Question, Logged────── worker
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from sharpen.agent.rollout.in_process import Attempt
from sharpen.errors import ConfigError, DatasetError, SharpenError
from sharpen.placement.user_code import UserCode
from sharpen.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a worker: what it runs, and the time limit of each attempt."""

    code: UserCode
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """How a worker reaches a model: over HTTP, with the rollout's key. `served`: by a gateway, not an endpoint."""

    name: str
    api_key: str
    base_url: str
    recorded: bool
    served: bool
    policies: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An attempt to make; `cards` has the policy's under the name `POLICY`, and those of the auxiliary models."""

    number: int
    task: Task
    rollout_id: str
    noise_seed: int
    group_size: int
    cards: Mapping[str, ModelCard]


POLICY = ""
OUT_OF_MEMORY = 213
"""The exit code of a worker that finds no more memory, so that it can say nothing else."""


@dataclass(frozen=True, slots=True)
class Question:
    """The worker asks for what the run knows of a model of the attempt with this number."""

    number: int
    attempt: int
    model: str
    what: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question: a value, or the error to raise."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has loaded the user's functions."""


@dataclass(frozen=True, slots=True)
class Done:
    """A finished attempt, without its calls: the run has recorded them."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Failed:
    """The error that ends the worker's start, the run if it is bad input, or else the attempt alone."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Logged:
    """What the user's code, or ours there, logged."""

    name: str
    level: int
    text: str


class Channel:
    """One end of the pair. Any thread may send, one receives."""

    def __init__(self, file: int) -> None:
        self._connection: Connection[Any, Any] = Connection(file)
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message. Raises `OSError` if the other process has ended, `ConfigError` if it cannot be pickled."""
        try:
            data = pickle.dumps(message)
        except MemoryError:
            raise
        except Exception as error:  # objects of the user's
            raise ConfigError(
                f"{type(message).__name__.lower()} cannot be sent to another process (rollout.isolation): "
                f"{type(error).__name__}: {error}"
            ) from error
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Wait for the next message. Raises `EOFError` or `OSError` once the other process has ended."""
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def sendable(error: Exception) -> Exception:
    """Return an error that can be sent: this one, or its text as one of ours."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # the user's class of errors
        text = f"{type(error).__name__}: {error}"
        return ConfigError(text) if isinstance(error, ConfigError | DatasetError) else SharpenError(text)
    return error
