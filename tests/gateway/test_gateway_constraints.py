"""From a request's fields to a grammar: which texts it lets the model write; and answers of a real engine under it."""

import json
from enum import StrEnum
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoTokenizer

from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.gateway.constraints import constraint_of
from sharpen.gateway.formats.table import formats_of
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.protocols.chat import parse_request
from sharpen.gateway.protocols.protocol import Context
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError
from sharpen.types import Sampling

USER = [{"role": "user", "content": "?"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
JSON_X = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def tool(name: str, strict: bool = False, schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


def call(name: str, arguments: str = '{"x": 1}', between: str = "\n") -> str:
    return f'<tool_call>{between}{{"name": "{name}", "arguments": {arguments}}}{between}</tool_call>'


ADD, SUB, ANY_SUB = call("add"), call("sub"), call("sub", '{"y": [2]}')
REQUIRED = {"tools": [tool("add"), tool("sub")], "tool_choice": "required"}
NAMED = {**REQUIRED, "tool_choice": {"type": "function", "function": {"name": "sub"}}}
STRICT = {"tools": [tool("add", strict=True), tool("sub")]}
BOTH = {"tools": [tool("add")], "response_format": JSON_X}

ALLOWED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": JSON_X}, '{"x": 1}'),
    ({"response_format": JSON_X}, '{"x":-12}'),
    ({"response_format": JSON_X}, '<think>{"x": "say"</think>\n\n{"x": 1}'),
    ({"response_format": {"type": "json_object"}}, '{"a": [1, "<b>", {"b": null}]}'),
    (REQUIRED, ADD),
    (REQUIRED, call("sub", between="")),
    (REQUIRED, f"<think>\nadd?</think>\n\n{ADD}\n{SUB}"),
    (NAMED, SUB),
    (STRICT, "just text, 1 < 2 <b>"),
    (STRICT, f"text\n{ADD} and {ANY_SUB}\nmore"),
    (BOTH, '{"x": 1}'),
    (BOTH, ADD),
]
FORBIDDEN: list[tuple[dict[str, Any], str]] = [
    ({"response_format": JSON_X}, "x"),
    ({"response_format": JSON_X}, '{"y"'),
    ({"response_format": JSON_X}, '{"x": "1"'),
    ({"response_format": JSON_X}, '{"x":  1'),  # whitespace has bounds
    ({"response_format": JSON_X}, "\n\n\n"),
    ({"response_format": JSON_X}, '{"x": 1} and'),
    ({"response_format": {"type": "json_object"}}, "[1]"),
    (REQUIRED, "text"),
    (REQUIRED, call("mul")),
    (REQUIRED, call("add", '{"y": 1}')),
    ({**REQUIRED, "parallel_tool_calls": False}, f"{ADD}\n{SUB}"),
    (NAMED, ADD),
    (NAMED, f"{SUB}\n{SUB}"),
    (STRICT, call("add", '{"y": 2}')),
    (STRICT, call("mul")),
    (STRICT, "text <tool_call> then"),
    (BOTH, "text"),
]


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


def grammar_of(renderer: Renderer, body: dict[str, Any], prompt: str = "assistant\n", **formats: Any) -> str | None:
    """The grammar of a request whose prompt ends in `prompt`."""
    request, _ = parse_request({"messages": USER, **body}, Context(model_name="toy", defaults=Sampling()))
    names = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", **formats}
    found, _ = constraint_of(request, prompt, formats_of(renderer.template, **names), renderer.added_token)
    return None if found is None else found.grammar


def accepts(tokenizer: Any, grammar: str, text: str) -> tuple[bool, bool]:
    """Whether each token of the text is allowed, and whether the answer may end there."""
    matcher = LLMatcher(from_tokenizer(tokenizer), grammar)
    assert not matcher.is_error(), matcher.get_error()
    fits = all(matcher.consume_token(token) for token in tokenizer.encode(text, add_special_tokens=False))
    return fits, fits and matcher.is_accepting()


@pytest.mark.parametrize(("body", "text"), ALLOWED)
def test_these_answers_are_possible(tokenizer: Any, renderer: Renderer, body: dict[str, Any], text: str) -> None:
    assert accepts(tokenizer, grammar_of(renderer, body) or "", text) == (True, True)


@pytest.mark.parametrize(("body", "text"), FORBIDDEN)
def test_these_are_not(tokenizer: Any, renderer: Renderer, body: dict[str, Any], text: str) -> None:
    assert accepts(tokenizer, grammar_of(renderer, body) or "", text) == (False, False)


@pytest.mark.parametrize("body", [{}, {"tools": [tool("add")]}, {**REQUIRED, "tool_choice": "none"}])
def test_a_request_for_any_text_has_no_constraint(renderer: Renderer, body: dict[str, Any]) -> None:
    assert grammar_of(renderer, body) is None


def test_reasoning_comes_first_where_the_prompt_leaves_room_for_it(tokenizer: Any, renderer: Renderer) -> None:
    """Opened by the prompt, it must be closed before the answer; closed by the prompt, there is none."""
    said, answer = "hm {</think>\n\n", '{"x": 1}'
    opened = grammar_of(renderer, {"response_format": JSON_X}, "assistant\n<think>\n") or ""
    assert accepts(tokenizer, opened, said + answer) == (True, True)
    assert accepts(tokenizer, opened, answer) == (True, False)
    closed = grammar_of(renderer, {"response_format": JSON_X}, "<think>\n\n</think>\n\n") or ""
    assert accepts(tokenizer, closed, answer) == (True, True)
    assert accepts(tokenizer, closed, "<think>")[0] is False


PATTERN = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^a"}}, "required": ["x"]}
NOT_ENFORCED = [
    ("qwen3_coder", tool("add", True, PATTERN), ("add", "'pattern'")),
    ("gemma4", tool("add", True, PATTERN), ("add", "'pattern'")),
    ("glm45", tool("add", True, {**SCHEMA, "properties": {"x<y": {}}, "required": ["x<y"]}), ("add", "'x<y'")),
    ("pythonic", tool("get-it", True), ("get-it", "pythonic")),
    (None, tool("add", True), ("no known format",)),
]


@pytest.mark.parametrize(("parser", "wish", "said"), NOT_ENFORCED)
def test_what_no_grammar_holds_is_reported(
    serve: Any, caplog: pytest.LogCaptureFixture, parser: str | None, wish: dict[str, Any], said: tuple[str, ...]
) -> None:
    session = serve("hi", tool_call_parser=parser).open()
    session.model.sync_client.chat.completions.create(model="toy", messages=USER, tools=[wish], tool_choice="required")
    session.close()
    assert all(text in caplog.text for text in ("tool_choice: accepted", "not", "enforced", *said)), caplog.text


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "gemma4", "glm45", "mistral", "deepseek_v3", "kimi_k2"])
def test_all_of_an_ordinary_schema_is_enforced(serve: Any, caplog: pytest.LogCaptureFixture, parser: str) -> None:
    session = serve("hi", tool_call_parser=parser).open()
    session.model.sync_client.chat.completions.create(model="toy", messages=USER, **REQUIRED)
    assert "enforced" not in caplog.text
    (call,) = session.close()
    assert call.constraint is not None


def test_a_schema_beside_tools_that_cannot_be_called_is_refused(renderer: Renderer) -> None:
    for parser in (None, "pythonic"):
        with pytest.raises(ApiError, match=r"response_format.* tools"):
            grammar_of(renderer, {**BOTH, "tools": [tool("get-it")]}, tool_call_parser=parser)


class City(StrEnum):
    BERN = "Bern"
    OSLO = "Oslo"


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: City
    days: int = Field(ge=1, le=9)
    sure: bool


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder", "gemma4"])
def real(request: pytest.FixtureRequest, serving: Any, toy_model_dir: Any) -> Any:
    """A gateway over the embedded engine with a model that knows nothing, and with one of the formats of tool calls."""
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    engine = EmbeddedEngine.from_pretrained(
        str(toy_model_dir), max_model_len=512, max_slots=8, device="cpu", tokenizer=tokenizer
    )
    gateway = Gateway(
        engine,
        tokenizer,
        model_name="toy",
        loop=serving.loop,
        sampling=Sampling(max_tokens=300),
        tool_call_parser=request.param,
    )
    yield gateway
    serving.run(gateway.close())
    serving.run(engine.close())


def test_pydantic_models_are_parsed_by_openai_s_client(real: Gateway) -> None:
    session = real.open("g/0", noise_seed=1)
    parse = session.model.sync_client.chat.completions.parse
    for _ in range(4):
        trip = parse(model="toy", messages=USER, response_format=Trip).choices[0].message.parsed
        assert isinstance(trip, Trip)
    calls = session.close()
    assert {json.loads(call.response["content"])["city"] for call in calls} == {"Bern", "Oslo"}
    assert {call.constraint.origin for call in calls if call.constraint} == {"response_format"}
    assert len({call.constraint for call in calls}) == 1
    assert all(np.isfinite(call.logprobs_S).all() for call in calls)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called_with_arguments_of_its_schema(real: Gateway, stream: bool) -> None:
    client = real.open("g/1", noise_seed=2).model.sync_client
    options = {"tools": [tool("book", True, Trip.model_json_schema()), tool("sub")]}
    choice = {"type": "function", "function": {"name": "book"}}
    if stream:
        with client.chat.completions.stream(model="toy", messages=USER, tool_choice=choice, **options) as events:
            (made,) = events.get_final_completion().choices[0].message.tool_calls
    else:
        answer = client.chat.completions.create(model="toy", messages=USER, tool_choice=choice, **options)
        (made,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
    assert made.function.name == "book"
    Trip.model_validate_json(made.function.arguments)


SCHEMA_OF_TRIP = Trip.model_json_schema()


def post(session: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {session.model.api_key}"}
    answer = httpx.post(f"{session.model.base_url}{path}", headers=headers, json={"model": "toy", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_anthropic_s_messages_have_the_same(real: Gateway) -> None:
    session = real.open("g/2", noise_seed=3)
    body = {"max_tokens": 300, "messages": USER}
    form = {"format": {"type": "json_schema", "schema": SCHEMA_OF_TRIP}}
    answer = post(session, "/messages", {**body, "output_config": form})
    Trip.model_validate_json(answer["content"][0]["text"])
    tools = [{"name": "book", "input_schema": SCHEMA_OF_TRIP}, {"name": "sub", "input_schema": SCHEMA}]
    answer = post(session, "/messages", {**body, "tools": tools, "tool_choice": {"type": "tool", "name": "book"}})
    (block,) = answer["content"]
    assert (block["type"], block["name"]) == ("tool_use", "book")
    Trip.model_validate(block["input"])
    made = [call.constraint.origin for call in session.close() if call.constraint is not None]
    assert made == ["output_config", "tool_choice"]


def test_openai_s_responses_have_the_same(real: Gateway) -> None:
    session = real.open("g/4", noise_seed=5)
    body = {"input": "?", "max_output_tokens": 300}
    form = {"type": "json_schema", "name": "trip", "strict": True, "schema": SCHEMA_OF_TRIP}
    answer = post(session, "/responses", {**body, "text": {"format": form}})
    Trip.model_validate_json(answer["output"][-1]["content"][0]["text"])
    tools = [{"type": "function", "name": "book", "parameters": SCHEMA_OF_TRIP, "strict": True}]
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "book"}]}
    for choice in ({"type": "function", "name": "book"}, chosen):
        answer = post(
            session, "/responses", {**body, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        )
        made = answer["output"][-1]
        assert (made["type"], made["name"]) == ("function_call", "book")
        Trip.model_validate_json(made["arguments"])
    origins = [call.constraint.origin for call in session.close() if call.constraint is not None]
    assert origins == ["text.format", "tool_choice", "tool_choice"]


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}},
        "response_format",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "object", "contains": {}}},
            }
        },
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/none"}}}},
        "response_format",
    ),
    ({"tools": [tool("book", True, {"type": 5})], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool("book", True, {"type": 5})]}, "tools"),
    ({"tools": [tool("book", True, {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}})]}, "tools"),
]


@pytest.mark.parametrize(("options", "param"), WRONG)
def test_a_schema_that_cannot_be_compiled_is_the_vendor_s_400(real: Gateway, options: Any, param: str) -> None:
    session = real.open("g/3", noise_seed=4)
    with pytest.raises(openai.BadRequestError) as caught:
        session.model.sync_client.chat.completions.create(model="toy", messages=USER, **options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert session.failure is None


def test_the_beginning_of_an_answer_cannot_be_given_too(serve: Any) -> None:
    session = serve("hi").open()
    said = [*USER, {"role": "assistant", "content": "{"}]
    with pytest.raises(openai.BadRequestError, match="beginning"):
        session.model.sync_client.chat.completions.create(
            model="toy", messages=said, response_format=JSON_X, extra_body={"continue_final_message": True}
        )


def test_a_forced_call_after_the_beginning_of_an_answer_is_a_wish(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    session = serve("hi").open()
    said = [*USER, {"role": "assistant", "content": "I"}]
    session.model.sync_client.chat.completions.create(
        model="toy", messages=said, extra_body={"continue_final_message": True}, **REQUIRED
    )
    assert "tool_choice: accepted, but not enforced: the beginning of the answer is given" in caplog.text
    assert session.close()[0].constraint is None
