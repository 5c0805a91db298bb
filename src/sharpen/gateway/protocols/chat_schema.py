"""What a request of OpenAI's Chat Completions looks like, and a message that was recorded.

`door.Door` checks requests by these types, and an OpenAPI document describes them by these types. What only the whole
request shows (a tool that is not among those offered) is `chat`'s to refuse.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from sharpen.gateway.door import (
    CLOSED,
    OPEN,
    Items,
    MinP,
    NoFields,
    NoItems,
    SomeItems,
    StopStrings,
    Text,
    TokenCount,
    TopK,
    TopP,
    Truth,
    unsupported,
)
from sharpen.gateway.requests import REFERENCE

MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_TEMPERATURE = 128, 20, 100
MAX_SEED = 2**63 - 1
NOT_AUDIO = unsupported("only text is supported")
NOT_FUNCTION_CALL = unsupported("send 'tool_calls'")
NOT_PREFIX = unsupported("send 'continue_final_message' with the request")
NOT_CALLS = unsupported("it belongs to assistant messages only")
Penalty = Annotated[float, Field(ge=0, le=0)] | None
"""It would change the distribution in a way that is not recorded."""
Effort = Annotated[str, Field(pattern="^[A-Za-z]+$")] | None


@with_config(OPEN)
class TextPart(TypedDict):
    """A text among the parts of a content."""

    type: Literal["text"]
    text: str


@with_config(OPEN)
class ImageUrl(TypedDict):
    """Where an image is: a data URL."""

    url: str


@with_config(OPEN)
class ImagePart(TypedDict):
    """An image among the parts of a content."""

    type: Literal["image_url"]
    image_url: str | ImageUrl


@with_config(OPEN)
class CalledFunction(TypedDict):
    """The function that a call calls."""

    name: str
    arguments: str


@with_config(OPEN)
class ToolCall(TypedDict, total=False):
    """A call of a tool."""

    id: Text
    function: Required[CalledFunction]


@with_config(OPEN)
class Reference(TypedDict):
    """What stands for an image in a recorded message: its hash."""

    url: Annotated[str, Field(pattern=f"^{REFERENCE}")]


@with_config(OPEN)
class RecordedImagePart(TypedDict):
    """An image among the parts of a recorded content."""

    type: Literal["image_url"]
    image_url: Reference


Content = str | Items[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None

RecordedContent = str | Items[Annotated[TextPart | RecordedImagePart, Field(discriminator="type")]] | None


class _Told(TypedDict, total=False):
    """What every message may have."""

    name: Text
    tool_call_id: Text
    reasoning_content: Text
    refusal: Any
    annotations: Any
    audio: NOT_AUDIO  # type: ignore[valid-type]
    function_call: NOT_FUNCTION_CALL  # type: ignore[valid-type]
    partial: NOT_PREFIX  # type: ignore[valid-type]
    prefix: NOT_PREFIX  # type: ignore[valid-type]


@with_config(OPEN)
class Message(_Told, total=False):
    """A message that the model did not write. Fields that are not OpenAI's are the chat template's to read."""

    role: Required[Literal["system", "developer", "user", "tool"]]
    content: Content
    tool_calls: NOT_CALLS  # type: ignore[valid-type]


@with_config(OPEN)
class AssistantMessage(_Told, total=False):
    """A message of the model's. Fields that are not OpenAI's are the chat template's to read."""

    role: Required[Literal["assistant"]]
    content: Content
    tool_calls: Items[ToolCall] | None


AnyMessage = Annotated[Message | AssistantMessage, Field(discriminator="role")]


@with_config(CLOSED)
class KnownMessage(_Told, total=False):
    """A message as it is recorded, that the model did not write."""

    role: Required[Literal["system", "developer", "user", "tool"]]
    content: RecordedContent
    tool_calls: NOT_CALLS  # type: ignore[valid-type]


@with_config(CLOSED)
class KnownAssistantMessage(_Told, total=False):
    """A message as it is recorded, of the model's."""

    role: Required[Literal["assistant"]]
    content: RecordedContent
    tool_calls: Items[ToolCall] | None


AnyKnownMessage = Annotated[KnownMessage | KnownAssistantMessage, Field(discriminator="role")]


@with_config(OPEN)
class Function(TypedDict, total=False):
    """A function that the model may call. The chat template shows all its fields."""

    name: Required[str]
    parameters: dict[str, Any] | NoItems | None
    strict: Truth


@with_config(OPEN)
class Tool(TypedDict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


@with_config(OPEN)
class FunctionName(TypedDict):
    """The name of a function."""

    name: str


@with_config(OPEN)
class NamedTool(TypedDict):
    """A choice of one tool."""

    type: Literal["function"]
    function: FunctionName


@with_config(OPEN)
class AllowedTool(TypedDict):
    """One of the tools that are allowed."""

    function: FunctionName


@with_config(OPEN)
class AllowedToolsChoice(TypedDict):
    """Which tools are allowed, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: SomeItems[AllowedTool]


@with_config(OPEN)
class AllowedTools(TypedDict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsChoice


ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None
)


@with_config(OPEN)
class PlainFormat(TypedDict):
    """An answer that may be any text, or any JSON object."""

    type: Literal["text", "json_object"]


@with_config(OPEN)
class JsonSchema(TypedDict, total=False):
    """A schema by its name."""

    schema: Required[dict[str, Any]]
    strict: Truth


@with_config(OPEN)
class SchemaFormat(TypedDict, total=False):
    """An answer in JSON that has a schema, which some clients send as Responses has it: without `json_schema`."""

    type: Required[Literal["json_schema"]]
    json_schema: JsonSchema | None
    schema: dict[str, Any] | None
    strict: Truth


@with_config(ConfigDict(**OPEN, json_schema_extra={"additionalProperties": False}))
class StreamOptions(TypedDict, total=False):
    """What a stream has beside the answer. Other fields are `chat`'s to refuse: a million would be as many problems."""

    include_usage: Truth
    include_obfuscation: Truth


class Shared(TypedDict, total=False):
    """The fields that Completions has too."""

    model: Text
    frequency_penalty: Penalty
    logit_bias: NoFields | None
    max_tokens: TokenCount
    metadata: Any
    min_p: MinP
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None
    presence_penalty: Penalty
    return_token_ids: Truth
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None
    stop: StopStrings
    store: Any
    stream: Truth
    stream_options: StreamOptions | None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None
    top_k: TopK
    top_p: TopP
    user: Any


@with_config(CLOSED)
class ChatRequest(Shared, total=False):
    """A request of Chat Completions. Fields of any type are accepted without effect: they change neither the prompt nor
    the distribution."""

    messages: Required[SomeItems[AnyMessage]]
    chat_template_kwargs: dict[str, Any] | None
    continue_final_message: Truth
    logprobs: Truth
    max_completion_tokens: TokenCount
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None
    parallel_tool_calls: Truth
    plain_text: Truth
    prompt_cache_key: Any
    prompt_cache_retention: Any
    reasoning_effort: Effort
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None
    safety_identifier: Any
    service_tier: Any
    tool_choice: ToolChoice
    tools: Items[Tool] | None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None
    verbosity: Any
