"""The door: what a request must look like before anything else of the gateway sees it.

In: a decoded body, and the schema of the requests of one protocol, a `TypedDict` in pydantic's terms. Out: nothing for
a body that is right (it is used as it came: types are strict, nothing is converted); `ApiError` in the vendor's words,
with the name of the field and its value, for any other. The same schema describes the requests in the OpenAPI document
of a server (`serve.openapi`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from sharpen.gateway.requests import ApiError, short_repr

CLOSED, OPEN = ConfigDict(extra="forbid", strict=True), ConfigDict(extra="allow", strict=True)
"""Objects that may have no other fields than those of their schema, and objects that may."""
MAX_INT32 = 2**31 - 1
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong item is enough: there may be a million."""
SomeItems = Annotated[list[T], Field(fail_fast=True, min_length=1)]
NoItems = Annotated[list[Any], Field(max_length=0)]
"""As PHP writes an empty object."""
NoFields = Annotated[dict[str, Any], Field(max_length=0)]
SomeText = Annotated[str, Field(min_length=1)]
Text = str | None
Truth = bool | None
StopStrings = SomeText | Items[SomeText] | None
TokenCount = Annotated[int, Field(ge=1, le=MAX_INT32)] | None
TopP = Annotated[float, Field(ge=0, le=1)] | None
MinP = Annotated[float, Field(ge=0, le=1)] | None
TopK = Annotated[int, Field(ge=-1, le=MAX_INT32)] | None
Place = tuple[str | int, ...]
_NOT_FACTS = re.compile(r"^\w+ should | after validation, not \w+$")
_EXPECTED = {
    "bool_type": "be true or false",
    "dict_type": "be an object",
    "float_type": "be a number",
    "int_type": "be an integer",
    "list_type": "be a list",
    "model_attributes_type": "be an object",
    "string_type": "be a string",
    "union_tag_not_found": "be a string that says what this is",
}
"""In JSON's words."""


def unsupported(remedy: str) -> Any:
    """Return the type of a field that may only be null, false or empty; `remedy` says what to do instead."""
    return _only(lambda value: not value, {"enum": [None, False, 0, "", [], {}]}, remedy)


def only(known: str, remedy: str) -> Any:
    """Return the type of a field that has one known value; `remedy` says why others are not supported."""
    return _only(lambda value: value == known, {"const": known}, remedy)


def _only(is_right: Callable[[Any], bool], schema: dict[str, Any], remedy: str) -> Any:
    def check(value: Any) -> Any:
        if not is_right(value):
            raise PydanticCustomError("unsupported", "{remedy}", {"remedy": remedy})
        return value

    return Annotated[Any, AfterValidator(check), WithJsonSchema(schema)]


class Door:
    """Checks the bodies of one kind of request.

    `place` writes a place in a body as the vendor does. `unknown` is the vendor's error for a field that it does not
    know, from the field's name; without it the schema says whether there may be such fields. One that is null is as one
    that is absent, as in clients that write all fields of their own.
    """

    def __init__(
        self, schema: Any, place: Callable[[Place], str], unknown: Callable[[str], ApiError] | None = None
    ) -> None:
        self.adapter: TypeAdapter[Any] = TypeAdapter(schema)
        self._validate = self.adapter.validator.validate_python
        self._place, self._unknown = place, unknown
        self._known = frozenset(getattr(schema, "__annotations__", ()))  # a choice of types has none

    def check(self, body: Any, *at: str | int) -> None:
        """Raise `ApiError` unless a decoded body is right. `at` is its own place, if it is a part of another."""
        if isinstance(body, dict) and not body.keys() <= self._known:
            body = self._without_nulls(body)
        try:
            self._validate(body)
        except ValidationError as error:
            raise self._refusal(error, body, at) from None

    def _without_nulls(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body without unknown fields that are null. Raises `ApiError` for the first of the others if there
        may be none: else each were a problem."""
        others = (name for name, value in body.items() if value is not None and name not in self._known)
        if self._unknown is not None and (name := next(others, None)) is not None:
            raise self._unknown(name)
        return {name: value for name, value in body.items() if value is not None or name in self._known}

    def _refusal(self, error: ValidationError, body: Any, at: Place) -> ApiError:
        """Return the error for the first problem. One of a choice of types has a problem for each: those which are
        deepest in the body say most, and at one place they are one."""
        if not isinstance(body, dict):
            return ApiError(
                f"'{self._place(at)}' must be an object." if at else "The request body must be a JSON object.",
                param=self._place(at) or None,
            )
        problems = [(_place_of(problem, body), problem) for problem in error.errors(include_url=False)]
        first = problems[0][0]
        within = [one for one in problems if one[0][: len(first)] == first]
        deepest = max(within, key=lambda one: len(one[0]))[0]
        told = [problem for place, problem in within if place == deepest]
        name = self._place((*at, *deepest))
        return ApiError(_sentence(name, _value_at(body, deepest), told), param=name)


def openai_place(place: Place) -> str:
    """Return a place as OpenAI writes it: `messages[0].content`."""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place).removeprefix(".")


def anthropic_place(place: Place) -> str:
    """Return a place as Anthropic writes it: `messages.0.content`."""
    return ".".join(map(str, place))


def _place_of(problem: Mapping[str, Any], body: Any) -> Place:
    """Return where a problem is. Pydantic's places have the names of types between those of fields."""
    place: list[str | int] = []
    value, parts = body, problem["loc"]
    for part in parts:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
        else:
            continue
        place.append(part)
    if problem["type"] == "missing":
        place.append(parts[-1])
    elif problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        place.append(problem["ctx"]["discriminator"].strip("'()_"))
    return tuple(place)


def _value_at(body: Any, place: Place) -> Any:
    for part in place:
        if isinstance(body, dict) and part not in body:
            return None
        body = body[part]
    return body


def _sentence(name: str, value: Any, told: Sequence[Mapping[str, Any]]) -> str:
    kind = told[0]["type"]
    if kind == "missing":
        return f"{name}: Field required"
    if kind == "extra_forbidden":
        return f"{name}: Extra inputs are not permitted"
    if kind == "unsupported":
        return f"'{name}' is {short_repr(value)}, which is not supported here: {told[0]['msg']}."
    expected = " or ".join(dict.fromkeys(map(_expected, told)))
    return f"'{name}' is {short_repr(value)}; it must {expected}."


def _expected(problem: Mapping[str, Any]) -> str:
    """Return what a value has to be, in words that follow 'it must'."""
    if problem["type"] == "union_tag_invalid":
        return f"be one of {problem['ctx']['expected_tags']}"
    return _EXPECTED.get(problem["type"]) or _NOT_FACTS.sub("", problem["msg"])
