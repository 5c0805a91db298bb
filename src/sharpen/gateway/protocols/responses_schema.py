"""What a request of OpenAI's Responses looks like (see `chat_schema`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from sharpen.gateway.door import CLOSED, OPEN, Items, NoFields, NoItems, Text, TokenCount, TopP, Truth, unsupported
from sharpen.gateway.protocols.chat_schema import MAX_TOP_LOGPROBS, Effort, PlainFormat

ANSWER = "message of the assistant"


def type_(item: Mapping[str, Any]) -> Any:
    """Return the type of an item: a message without one, and the model's own apart."""
    if not isinstance(item, dict):
        return "message"  # which it is found not to be
    kind = item.get("type", "message")
    return ANSWER if kind == "message" and item.get("role") == "assistant" else kind


def tool_type(tool: Mapping[str, Any]) -> str:
    """Return the type of a tool, of those that the model can be told of."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if kind in ("function", "custom") else "other"


@with_config(OPEN)
class TextContent(TypedDict):
    """A text among the parts of a content."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str


@with_config(OPEN)
class ImageContent(TypedDict, total=False):
    """An image among the parts of a content, in a data URL: no files are kept here."""

    type: Required[Literal["input_image"]]
    image_url: Text


Texts = str | Items[TextContent]
Parts = str | Items[Annotated[TextContent | ImageContent, Field(discriminator="type")]]


@with_config(OPEN)
class InputMessage(TypedDict):
    """A message that the model did not write."""

    type: NotRequired[Literal["message"]]
    role: Literal["user", "system", "developer"]
    content: Parts


@with_config(OPEN)
class Answer(TypedDict):
    """A message of the model's."""

    type: NotRequired[Literal["message"]]
    role: Literal["assistant"]
    content: Texts


@with_config(OPEN)
class Reasoning(TypedDict):
    """What the model thought."""

    type: Literal["reasoning"]
    content: NotRequired[Texts | None]
    encrypted_content: NotRequired[Text]
    summary: NotRequired[Texts | None]


@with_config(OPEN)
class FunctionCall(TypedDict):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


@with_config(OPEN)
class CustomToolCall(TypedDict):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


@with_config(OPEN)
class CallOutput(TypedDict):
    """What a function or a custom tool gave back."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts


@with_config(OPEN)
class ItemReference(TypedDict):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: str


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[Answer, Tag(ANSWER)]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(type_),
]


@with_config(OPEN)
class FunctionTool(TypedDict, total=False):
    """A function that the model may call."""

    type: Required[Literal["function"]]
    name: Required[str]
    description: Text
    parameters: dict[str, Any] | NoItems | None
    strict: Truth


@with_config(OPEN)
class CustomTool(TypedDict, total=False):
    """A tool that takes a text."""

    type: Required[Literal["custom"]]
    name: Required[str]
    description: Text


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[dict[str, Any], Tag("other")],
    Discriminator(tool_type),
]


@with_config(OPEN)
class ToolName(TypedDict):
    """A choice of one tool."""

    type: Literal["function", "custom"]
    name: str


@with_config(OPEN)
class AllowedName(TypedDict, total=False):
    """One of the tools that are allowed."""

    name: str


@with_config(OPEN)
class AllowedNames(TypedDict, total=False):
    """A choice among some of the tools."""

    type: Required[Literal["allowed_tools"]]
    mode: Literal["auto", "required"] | None
    tools: Items[AllowedName]


@with_config(OPEN)
class NamedSchemaFormat(TypedDict, total=False):
    """An answer in JSON that has a schema."""

    type: Required[Literal["json_schema"]]
    schema: Required[dict[str, Any]]
    strict: Truth


@with_config(OPEN)
class TextOptions(TypedDict, total=False):
    """What the answer has to be."""

    format: Annotated[PlainFormat | NamedSchemaFormat, Field(discriminator="type")] | NoFields | None


@with_config(OPEN)
class ReasoningOptions(TypedDict, total=False):
    """How much the model is to think, and whether a summary is given out."""

    effort: Effort
    summary: Any


@with_config(CLOSED)
class ResponsesRequest(TypedDict, total=False):
    """A request of Responses. Fields of any type are accepted without effect."""

    background: unsupported("answers are waited for")  # type: ignore[valid-type]
    client_metadata: Any
    context_management: unsupported("send the input that the model is to see")  # type: ignore[valid-type]
    conversation: unsupported("send the whole input, or previous_response_id")  # type: ignore[valid-type]
    include: Items[str] | None
    input: str | Items[Item] | None
    instructions: Text
    max_output_tokens: TokenCount
    max_tool_calls: Any
    metadata: Any
    model: Text
    moderation: Any
    parallel_tool_calls: Truth
    previous_response_id: Text
    prompt: unsupported("templates of prompts are not kept here")  # type: ignore[valid-type]
    prompt_cache_key: Any
    prompt_cache_options: Any
    prompt_cache_retention: Any
    reasoning: ReasoningOptions | None
    safety_identifier: Any
    service_tier: Any
    store: Truth
    stream: Truth
    stream_options: Any
    temperature: Annotated[float, Field(ge=0, le=2)] | None
    text: TextOptions | None
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[ToolName | AllowedNames, Field(discriminator="type")] | None
    )
    tools: Items[Tool] | None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None
    top_p: TopP
    truncation: Any
    user: Any
