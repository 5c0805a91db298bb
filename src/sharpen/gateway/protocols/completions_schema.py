"""What a request of OpenAI's legacy Completions looks like (see `chat_schema`)."""

from __future__ import annotations

from typing import Annotated, Required

from pydantic import Field, with_config

from sharpen.gateway.door import CLOSED, MAX_INT32, Items, SomeItems, unsupported
from sharpen.gateway.protocols.chat_schema import Shared

MAX_LOGPROBS = 5
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
NOT_ECHO = unsupported("the prompt is the request's own")
NOT_SUFFIX = unsupported("text is continued, not filled in")


@with_config(CLOSED)
class CompletionRequest(Shared, total=False):
    """A request of Completions, for one prompt: a text or token ids."""

    prompt: Required[str | SomeItems[TokenId] | Items[str] | Items[SomeItems[TokenId]]]
    best_of: int | None
    echo: NOT_ECHO  # type: ignore[valid-type]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None
    suffix: NOT_SUFFIX  # type: ignore[valid-type]
