"""Descriptions of errors and of places in the user's code.

In: exceptions and stack frames. Out: text like `KeyError: 'x' (agent.py:12 in run_agent)`.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from sharpen.config.functions import FILE_MODULE
from sharpen.config.secrets import hide
from sharpen.errors import UnusableAnswerError
from sharpen.types import Outcome

# Recognizes exceptions of user code that the model's answer caused.
#
# In: an exception, and the names that the user gave (`rollout.model_exceptions`). Out: the outcome, or None if the
# exception does not tell. No package is imported: types are compared by name.

KNOWN: Mapping[str, Outcome] = {
    "agents.MaxTurnsExceeded": Outcome.CALL_LIMIT,
    "agents.ModelBehaviorError": Outcome.UNUSABLE_ANSWER,
    "agents.ModelRefusalError": Outcome.UNUSABLE_ANSWER,
    "dspy.AdapterParseError": Outcome.UNUSABLE_ANSWER,
    "google.LlmCallsLimitExceededError": Outcome.CALL_LIMIT,
    "instructor.IncompleteOutputException": Outcome.TOKEN_LIMIT,
    "instructor.InstructorRetryException": Outcome.UNUSABLE_ANSWER,
    "instructor.ResponseParsingError": Outcome.UNUSABLE_ANSWER,
    "langchain.StructuredOutputError": Outcome.UNUSABLE_ANSWER,
    "langchain_core.OutputParserException": Outcome.UNUSABLE_ANSWER,
    "langgraph.GraphRecursionError": Outcome.CALL_LIMIT,
    "llama_index.OutputParserException": Outcome.UNUSABLE_ANSWER,
    "openai.LengthFinishReasonError": Outcome.TOKEN_LIMIT,
    "pydantic_ai.IncompleteToolCall": Outcome.TOKEN_LIMIT,
    "pydantic_ai.OutputTokenLimitExceeded": Outcome.TOKEN_LIMIT,
    "pydantic_ai.UnexpectedModelBehavior": Outcome.UNUSABLE_ANSWER,
    "pydantic_ai.UsageLimitExceeded": Outcome.CALL_LIMIT,
    "smolagents.AgentMaxStepsError": Outcome.CALL_LIMIT,
    "smolagents.AgentParsingError": Outcome.UNUSABLE_ANSWER,
    "smolagents.AgentToolCallError": Outcome.UNUSABLE_ANSWER,
    "strands.MaxTokensReachedException": Outcome.TOKEN_LIMIT,
    "strands.StructuredOutputException": Outcome.UNUSABLE_ANSWER,
}
"""Exceptions that frameworks raise on the model's output, by package and class. Subclasses have the outcome of their
nearest base."""


def declares_unusable(error: BaseException) -> bool:
    """Whether user code raised `UnusableAnswerError`."""
    return any(isinstance(cause, UnusableAnswerError) for cause in causes(error, implicit=True))


def named_outcome(error: BaseException, names: Sequence[str]) -> Outcome | None:
    """Return the outcome of the first exception, from the raised one to its causes, whose type is in `KNOWN` or in
    `names`; None if there is none."""
    for cause in causes(error, implicit=True):
        for kind in type(cause).__mro__:
            if any(_is_named(kind, name) for name in names):
                return Outcome.UNUSABLE_ANSWER
            if (outcome := KNOWN.get(_top_name(kind))) is not None:
                return outcome
    return None


def _is_named(kind: type, name: str) -> bool:
    """Whether `name` is this type, by the module that defines it, a module that exports it, or package and class."""
    module, _, attribute = name.rpartition(".")
    if name in (f"{_module(kind)}.{kind.__qualname__}", _top_name(kind)):
        return True
    return vars(sys.modules[module]).get(attribute) is kind if module in sys.modules else False


def _top_name(kind: type) -> str:
    """Return `package.Class`, without the modules in between."""
    return f"{_module(kind).partition('.')[0]}.{kind.__qualname__}"


def _module(kind: type) -> str:
    """Return a type's module as the user writes it: for a file that we loaded, its stem."""
    if kind.__module__.startswith(FILE_MODULE):
        return kind.__module__.removeprefix(FILE_MODULE).rpartition("_")[0]
    return kind.__module__


# What to do about an exception of user code, where its own words do not say it.
#
# In: the exception, and the outcome that it led to. Out: a hint in brackets, to stand behind the error; empty if there
# is nothing to add.

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


PACKAGE = str(Path(__file__).resolve().parents[2])
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folder names of installed packages, in any environment."""
MAX_CHARACTERS = 300
MAX_FRAMES, MAX_TRACEBACK = 30, 8000
"""Of a traceback: the frames of each error, the innermost ones; and its characters."""
_LITERAL = re.compile(r"""(['"])[^\s'"]{16,}\1""")
"""What may be a key: a long text without a space."""


def is_user_code(filename: str) -> bool:
    """Whether a source file is neither ours nor a library's."""
    if filename.startswith(PACKAGE):
        return False
    if filename.startswith(("<frozen", "<string")) or filename.startswith(LIBRARIES):
        return False
    return INSTALLED.isdisjoint(Path(filename).parts)


def place_of_error(error: BaseException) -> str | None:
    """Return `file:line in function` of the innermost user frame of an error's traceback, else of the innermost frame
    that is not ours; None if all are ours."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _innermost(frames)


def place_of_frame(frame: FrameType | None, *, user_only: bool = False) -> str | None:
    """Like `place_of_error`, for a thread's stack. With `user_only`, None if it has no user frame."""
    frames: list[tuple[CodeType, int]] = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    frames.reverse()
    if user_only:
        frames = [pair for pair in frames if is_user_code(pair[0].co_filename)]
    return _innermost(frames)


def imported_by(frame: FrameType | None) -> str | None:
    """Return the module that a thread is importing now, the outermost if imports are nested; None if there is none."""
    module = None
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" and frame.f_code.co_name == "_find_and_load":
            module = str(frame.f_locals.get("name"))
        frame = frame.f_back
    return module


def place_of_task(task: asyncio.Task[Any] | None, *, user_only: bool = False) -> str | None:
    """Like `place_of_frame`, for the place where a suspended task waits."""
    frames: list[tuple[CodeType, int]] = []
    waiting: Any = task.get_coro() if task is not None else None
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        frames.append((frame.f_code, frame.f_lineno))
        waiting = waiting.cr_await
    if user_only:
        frames = [pair for pair in frames if is_user_code(pair[0].co_filename)]
    return _innermost(frames)


def describe(error: BaseException) -> str:
    """Return an error's type, message and place in one line; secrets are hidden."""
    try:
        message = str(error)
    except Exception as second:  # the message is made by the user's code
        message = f"its message cannot be read: __str__ raised {type(second).__name__}"
    message = stored_text(" ".join(hide(message[: 100 * MAX_CHARACTERS]).split()))
    if len(message) > MAX_CHARACTERS:
        message = message[: MAX_CHARACTERS - 3] + "..."
    place = place_of_error(error)
    return type(error).__name__ + (f": {message}" if message else "") + (f" ({place})" if place else "")


def short_repr(value: Any) -> str:
    """Return the beginning of a value's `repr`, without secrets, and its type."""
    kind = type(value).__name__
    try:
        text = repr(value)
    except Exception as error:  # made by the user's code
        return f"an object of type {kind}, whose __repr__ raised {type(error).__name__}"
    text = " ".join(hide(text[: 100 * MAX_CHARACTERS]).split())
    return f"{stored_text(text[:80])} ({kind})"


def stored_text(text: str) -> str:
    """Return a text that files and databases take: half characters, which UTF-8 lacks, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def traceback_of(error: BaseException) -> str | None:
    """Return the traceback of an error and of its causes, without the frames that are ours and without what may be a
    key in a line of code; None if all frames are ours, or it cannot be read. A long one lacks its middle."""
    try:
        found = traceback.TracebackException.from_exception(error, limit=-MAX_FRAMES, compact=True)
        if not _take_out_ours(found):
            return None
        text = hide(stored_text("".join(found.format()).rstrip()))
    except Exception:  # the user's classes of errors, or thousands of causes: the failure is described without it
        return None
    if (left_out := len(text) - MAX_TRACEBACK) <= 0:
        return text
    head = MAX_TRACEBACK // 4
    return f"{text[:head]}\n[... {left_out:,} characters ...]\n{text[head + left_out :]}"


def _take_out_ours(found: traceback.TracebackException) -> bool:
    """Take our frames out of a traceback, and return whether any is left."""
    kept = [frame for frame in found.stack if not frame.filename.startswith(PACKAGE)]
    found.stack[:] = [
        traceback.FrameSummary(
            _short(frame.filename),
            frame.lineno,
            frame.name,
            lookup_line=False,
            line=_LITERAL.sub(r"\1...\1", frame.line or ""),
        )
        for frame in kept
    ]
    others = [one for one in (found.__cause__, found.__context__, *(found.exceptions or ())) if one is not None]
    return any([bool(kept), *map(_take_out_ours, others)])


def causes(error: BaseException, *, implicit: bool = False) -> Iterator[BaseException]:
    """Yield the error, the errors it was raised `from`, and the members of exception groups.

    With `implicit`, also errors that were being handled when another was raised, as a traceback shows them.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        cause = error.__cause__
        if cause is None and implicit and not error.__suppress_context__:
            cause = error.__context__
        if cause is not None:
            waiting.append(cause)
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(reversed(error.exceptions))


def _innermost(frames: list[tuple[CodeType, int]]) -> str | None:
    """Return the place of the last user frame (outermost first), else of the last frame that is not ours."""
    users = [frame for frame in frames if is_user_code(frame[0].co_filename)]
    foreign = [frame for frame in frames if not frame[0].co_filename.startswith(PACKAGE)]
    if not (users or foreign):
        return None
    code, line = (users or foreign)[-1]
    return f"{_short(code.co_filename)}:{line} in {code.co_name}"


def _short(filename: str) -> str:
    """Return the path relative to the working folder if it is below that, else unchanged."""
    path = Path(filename)
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # user code changed into a folder that was then deleted
        return filename
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else filename
