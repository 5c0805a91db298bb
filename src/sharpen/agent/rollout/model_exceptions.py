"""Recognizes exceptions of user code that the model's answer caused.

In: an exception, and the names that the user gave (`rollout.model_exceptions`). Out: the outcome, or None if the
exception does not tell. No package is imported: types are compared by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from sharpen.agent.rollout.places import causes
from sharpen.config.former import current
from sharpen.config.functions import FILE_MODULE
from sharpen.errors import UnusableAnswerError
from sharpen.types import Outcome

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
            if any(_is_named(kind, current(name)) for name in names):
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
