"""What a request of Anthropic's Messages looks like (see `chat_schema`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import Field, with_config
from typing_extensions import TypedDict

from sharpen.gateway.door import (
    CLOSED,
    MAX_INT32,
    OPEN,
    Items,
    SomeItems,
    StopStrings,
    Text,
    TokenCount,
    TopK,
    TopP,
    Truth,
    only,
    unsupported,
)

NO_TOOLS = unsupported("this server runs no tools of its own")


@with_config(OPEN)
class TextBlock(TypedDict):
    """A text."""

    type: Literal["text"]
    text: str


@with_config(OPEN)
class ImageSource(TypedDict):
    """The content of an image: images are not fetched here, nor are files kept."""

    type: only("base64", "images are not fetched here, nor are files kept")  # type: ignore[valid-type]
    data: str


@with_config(OPEN)
class ImageBlock(TypedDict):
    """An image."""

    type: Literal["image"]
    source: ImageSource


@with_config(OPEN)
class ThinkingBlock(TypedDict):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str


@with_config(OPEN)
class ToolUseBlock(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Shown = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


@with_config(OPEN)
class ToolResultBlock(TypedDict):
    """What a tool gave back."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[str | Items[Shown] | None]
    is_error: NotRequired[Truth]


@with_config(OPEN)
class UserMessage(TypedDict):
    """What the user says, with the results of tools."""

    role: Literal["user"]
    content: str | SomeItems[Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]]


@with_config(OPEN)
class AssistantTurn(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str | SomeItems[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]]


@with_config(OPEN)
class SystemMessage(TypedDict):
    """A reminder among the messages."""

    role: Literal["system"]
    content: str | SomeItems[TextBlock]


@with_config(OPEN)
class OfferedTool(TypedDict, total=False):
    """A tool that the model may call; one without a schema is Anthropic's own, which the model does not know."""

    name: Required[str]
    type: Text
    description: Text
    input_schema: dict[str, Any] | None
    strict: Truth


@with_config(OPEN)
class Choice(TypedDict, total=False):
    """Whether a tool must be called."""

    type: Required[Literal["auto", "any", "none"]]
    disable_parallel_tool_use: Truth


@with_config(OPEN)
class NamedChoice(TypedDict, total=False):
    """A choice of one tool."""

    type: Required[Literal["tool"]]
    name: Required[str]
    disable_parallel_tool_use: Truth


@with_config(OPEN)
class Thinking(TypedDict):
    """Whether thinking is given out."""

    type: Literal["enabled", "disabled", "adaptive"]


@with_config(OPEN)
class OutputFormat(TypedDict):
    """A schema for the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


@with_config(OPEN)
class OutputConfig(TypedDict, total=False):
    """What the answer has to be."""

    format: OutputFormat | None


class Counted(TypedDict, total=False):
    """The fields that a prompt is made of, and others that a request to count its tokens may have."""

    model: Text
    messages: Required[SomeItems[Annotated[UserMessage | AssistantTurn | SystemMessage, Field(discriminator="role")]]]
    system: str | Items[TextBlock] | None
    tools: Items[OfferedTool] | None
    tool_choice: Annotated[Choice | NamedChoice, Field(discriminator="type")] | None
    thinking: Thinking | None
    output_config: OutputConfig | None
    stop_sequences: StopStrings
    stream: Truth
    temperature: Annotated[float, Field(ge=0, le=1)] | None
    top_k: TopK
    top_p: TopP
    cache_control: Any
    context_management: Any
    inference_geo: Any
    metadata: Any
    service_tier: Any
    speed: Any


@with_config(OPEN)
class CountRequest(Counted, total=False):
    """A request to count the tokens of a prompt."""

    max_tokens: TokenCount


class Asked(Counted, total=False):
    """The fields of a request."""

    max_tokens: Required[Annotated[int, Field(ge=1, le=MAX_INT32)]]
    container: NO_TOOLS  # type: ignore[valid-type]
    mcp_servers: NO_TOOLS  # type: ignore[valid-type]
    thread: Any


@with_config(CLOSED)
class MessagesRequest(Asked, total=False):
    """A request of Messages. Fields of any type have no effect."""


@with_config(OPEN)
class BetaMessagesRequest(Asked, total=False):
    """A request with the header `anthropic-beta`: other fields have no effect."""
