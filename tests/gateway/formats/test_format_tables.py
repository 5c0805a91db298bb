"""What each format reads as calls, what it leaves as content, and what is malformed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from scripted import toy_tokenizer

from sharpen.gateway.formats.format import ParsedCalls, ReasoningFormat, ToolFormat
from sharpen.gateway.formats.hermes import HERMES
from sharpen.gateway.formats.table import REASONING_FORMATS, TOOL_FORMATS
from sharpen.testing import check_reasoning_format, check_tool_format

SCHEMA = {
    "type": "object",
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}}},
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "items": {"type": "array"},
        "point": {"$ref": "#/$defs/Point"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "color": {"enum": ["red", 1, None]},
        "free": {},
    },
}
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": SCHEMA}},)

DS_BEGIN, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_CALL, DS_SEP, DS_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def coder(*parameters: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


ONE = (("f", '{"a": 1}', None),)
TWO = (("f", '{"a": 1}', None), ("g", "{}", None))

READ: list[tuple[str, str, str, tuple[tuple[str, str, str | None], ...]]] = [
    ("qwen3_coder", coder(("count", "3")), "", (("f", '{"count": 3}', None),)),
    ("qwen3_coder", f"so\n\n{coder()}\n{coder(name='g')}", "so", (("f", "{}", None), ("g", "{}", None))),
    ("qwen3_coder", coder(("text", "3")), "", (("f", '{"text": "3"}', None),)),
    ("qwen3_coder", coder(("text", ' a "b"\\\n\né\t')), "", (("f", '{"text": " a \\"b\\"\\\\\\n\\né\\t"}', None),)),
    ("qwen3_coder", coder(("text", "")), "", (("f", '{"text": ""}', None),)),
    (
        "qwen3_coder",
        coder(("text", "</parameter> x <parameter=y> </tool_call>")),
        "",
        (("f", '{"text": "</parameter> x <parameter=y> </tool_call>"}', None),),
    ),
    ("qwen3_coder", coder(("unknown", "3")), "", (("f", '{"unknown": "3"}', None),)),
    ("qwen3_coder", coder(("count", "3"), name="g"), "", (("g", '{"count": "3"}', None),)),
    ("qwen3_coder", "<tool_call><function=f></function></tool_call> so", " so", (("f", "{}", None),)),
    ("hermes", 'so\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "so", ONE),
    ("glm45", "<tool_call>f\n<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", "",
     (("f", '{"count": 3}', None),)),
    ("glm45", "so\n<tool_call>f<arg_key>text</arg_key><arg_value>\n3</arg_value></tool_call>", "so",
     (("f", '{"text": "\\n3"}', None),)),
    ("glm45", "<tool_call>f\n</tool_call>\n<tool_call>g</tool_call>", "", (("f", "{}", None), ("g", "{}", None))),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", ONE),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", TWO),
    ("llama3_json", '{"name": "f", "arguments": {"a": 1}}', "", ONE),
    ("llama3_json", '{"answer": {"name": 1}}', '{"answer": {"name": 1}}', ()),
    ("llama3_json", 'like {"name": "f", "parameters": {}}', 'like {"name": "f", "parameters": {}}', ()),
    ("pythonic", "[f(a=1), g()]", "", TWO),
    ("pythonic", "[f(a='é\"\\n', b=[1, -2.5, None, true], c={'k': False})]", "",
     (("f", '{"a": "é\\"\\n", "b": [1, -2.5, null, true], "c": {"k": false}}', None),)),
    ("pythonic", r"[f(a='\d')]", "", (("f", r'{"a": "\\d"}', None),)),
    ("pythonic", "so<|tool_call_start|>[f(a=1)]<|tool_call_end|>then", "sothen", ONE),
    ("pythonic", "<|python_start|>[a.f(a=1)]<|python_end|>", "", (("a.f", '{"a": 1}', None),)),
    ("pythonic", "[1, 2]", "[1, 2]", ()),
    ("pythonic", "[link](address) f(a=1)", "[link](address) f(a=1)", ()),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", TWO),
    ("mistral", 'so[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "so", (("f", '{"a": 1}', "123456789"),)),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", ONE),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"arguments": {}, "name": "g"}]', "", TWO),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "",
     (("f", '{"a": 1}', "abcdefghi"),)),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}', "", (("f", '{"a": "[TOOL_CALLS]"}', None),)),
    ("gemma4", "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>", "", TWO),
    ("gemma4", '<|tool_call>call:f{a:<|"|>{x:1}, "é"\n<|"|>,b:[true,None,-1e-05],c:{k:{}}}<tool_call|>', "",
     (("f", '{"a": "{x:1}, \\"é\\"\\n", "b": [true, null, -1e-05], "c": {"k": {}}}', None),)),
    ("functiongemma", "<start_function_call>call:f{a:<escape>b}<escape>}<end_function_call>", "",
     (("f", '{"a": "b}"}', None),)),
    ("deepseek_v3",
     f'so{DS_BEGIN}{DS_CALL}function{DS_SEP}f\n```json\n{{"a": 1}}\n```{DS_CLOSE}\n'
     f"{DS_CALL}function{DS_SEP}g\n```json\n{{}}\n```{DS_CLOSE}{DS_END}", "so", TWO),
    ("deepseek_v31", f'{DS_BEGIN}{DS_CALL}f{DS_SEP}{{"a": 1}}{DS_CLOSE}{DS_CALL}g{DS_SEP}{{}}{DS_CLOSE}{DS_END}',
     "", TWO),
    ("kimi_k2", f"{KIMI_BEGIN}{kimi('functions.f:0', '{}')}{kimi('functions.g:1', '{}')}{KIMI_END}", "",
     (("f", "{}", "functions.f:0"), ("g", "{}", "functions.g:1"))),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", ONE),
    ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', "", ONE),
    ("harmony", 'so<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": 1}', "so", ONE),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), READ)
def test_calls(name: str, text: str, content: str, calls: tuple[tuple[str, str, str | None], ...]) -> None:
    found = TOOL_FORMATS[name].parse(text, TOOLS)
    assert (found[0], tuple((call.name, call.arguments, call.id) for call in found[1]), found[2]) == (
        content,
        calls,
        False,
    )


GOOD = {name: text for name, text, _, calls in READ if calls}
MALFORMED: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n</tool_call>",
        "<function=f>\n</function>",
        coder(("text", "a"), ("text", "b")),
        f"{coder()}</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>\ncut off",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=f>\nplain\n</function>\n</tool_call>",
    ),
    "glm45": (
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        "<tool_call>f",
        "<tool_call></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    "llama3_json": (
        '{"name": "f", "parameters": {"a": 1}',
        '{"name": "f", "parameters": "a"}',
        '{"name": "f", "parameters": {}} so',
        '{"name": "f"}',
        "<|python_tag|>print(1)",
        'so <|python_tag|>{"name": "f", "parameters": {}}',
        '{"name": "f", "parameters": {}}; ',
    ),
    "pythonic": (
        "[f(a=1)",
        "[f(1)]",
        "[f(a=g())]",
        "[f(a=1, a=2)]",
        "[f(**{})]",
        "[f(a=1e999)]",
        "[f(a={1: 2})]",
        "[f(a=b'x')]",
        "[f(), 1]",
        "<|tool_call_start|>[f()]",
        "<|tool_call_start|>[]<|tool_call_end|>",
        "[f(a='\\ud800')]",
        "[f(a=" + "[" * 5000,
        "[f(a=" + "-" * 50000 + "1)]",
    ),
    "mistral": (
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[ARGS]",
        '[TOOL_CALLS]f[ARGS]{"a": NaN}',
        '[TOOL_CALLS]f[ARGS]["a"]',
        "[TOOL_CALLS] []",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}',
        '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": 7}]',
        '[TOOL_CALLS] [{"name": "f", "name": "g", "arguments": {}}]',
        "[TOOL_CALLS]f[ARGS]{}[ARGS]",
    ),
    "gemma4": (
        "<|tool_call>call:f{a:1}",
        "<tool_call|>",
        "<|tool_call>call:f{a:b}<tool_call|>",
        "<|tool_call>call:f{a}<tool_call|>",
        '<|tool_call>call:f{a:<|"|>b}<tool_call|>',
        "<|tool_call>call:f{a:nan}<tool_call|>",
        '<|tool_call>call:f{{"a": 1}}<tool_call|>',
        "<|tool_call>call:f{a:" + "[" * 5000 + "<tool_call|>",
    ),
    "functiongemma": ("<start_function_call>call:f{a:<escape>b}<end_function_call>", "<end_function_call>"),
    "deepseek_v3": (
        f"{DS_BEGIN}{DS_CALL}function{DS_SEP}f\n```json\n{{}}\n```{DS_CLOSE}",
        f"{DS_BEGIN}{DS_CALL}f{DS_SEP}{{}}{DS_CLOSE}{DS_END}",
        f"{DS_CALL}function{DS_SEP}f\n```json\n{{}}\n```{DS_CLOSE}",
        f"{DS_BEGIN}{DS_END}",
    ),
    "deepseek_v31": (f"{DS_BEGIN}{DS_CALL}f{DS_SEP}[]{DS_CLOSE}{DS_END}", DS_END),
    "kimi_k2": (
        f"{KIMI_BEGIN}{kimi('functions.f', '{}')}{KIMI_END}",
        f"{KIMI_BEGIN}{kimi('functions.f:0', '[]')}{KIMI_END}",
        kimi("functions.f:0", "{}"),
        f"{KIMI_BEGIN}{KIMI_END}",
    ),
    "harmony": (
        "<|channel|>commentary to=functions.f<|message|>{",
        "<|channel|>commentary to=functions.f<|message|>{} so",
        "<|channel|>commentary to=browser.search<|message|>{}",
        "<|channel|>final",
        "so<|message|>",
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
    ),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_malformed_markup_stays_text(name: str, text: str) -> None:
    assert TOOL_FORMATS[name].parse(text, TOOLS) == (text, (), True)


@pytest.mark.parametrize("form", TOOL_FORMATS.values(), ids=lambda form: form.name)
def test_each_keeps_the_contract(form: ToolFormat) -> None:
    check_tool_format(form, [text for name, text, _, calls in READ if name == form.name and calls])


def _loses(text: str, tools: Any) -> ParsedCalls:
    content, calls, malformed = HERMES.parse(text, tools)
    return content if calls else content.strip(), calls, malformed


def _raises(text: str, tools: Any) -> ParsedCalls:
    if "<tool_call>" in text:
        json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
    return HERMES.parse(text, tools)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parse": _loses}, r"hermes reads ' plain\\n', which has no markup, as \('plain'"),
        ({"parse": _raises}, r"hermes raised JSONDecodeError for "),
        ({"opens": ("<call>",)}, r"reads a call in .*where nothing of `opens` \('<call>',\) stands"),
        ({"markup": TOOL_FORMATS["glm45"].markup}, r"the grammar of hermes lets '<tool_call>.* be sampled, "),
    ],
)
def test_a_format_that_breaks_the_contract_is_told_how(change: dict[str, Any], said: str) -> None:
    good = GOOD["hermes"]
    with pytest.raises(AssertionError, match=said):
        check_tool_format(replace(HERMES, **change), [good])


@pytest.mark.parametrize("form", TOOL_FORMATS.values(), ids=lambda form: form.name)
def test_markup_of_another_format_beside_a_call_is_content_or_malformed(form: ToolFormat) -> None:
    mine = GOOD.get(form.name, '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    for name, other in GOOD.items():
        if name == form.name:
            continue
        content, calls, malformed = form.parse(f"{mine} {other}", TOOLS)
        assert malformed != bool(calls)
        assert content == f"{mine} {other}" if malformed else other.strip()[:5] in content


SPELLED = [
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=items>\n{}\n</parameter>\n</function>\n</tool_call>",
        "</parameter></function></tool_call>",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=items>\n{}\n</parameter>\n</function>\n</tool_call>",
        "</parameter><parameter=count>",
    ),
    ("glm45", "<tool_call>f<arg_key>items</arg_key><arg_value>{}</arg_value></tool_call>", "</arg_value></tool_call>"),
    (
        "glm45",
        "<tool_call>f<arg_key>items</arg_key><arg_value>{}</arg_value></tool_call>",
        "</arg_value><arg_key>count</arg_key>",
    ),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{{"items": {}}}<|call|>', "<|call|>"),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{{"items": {}}}', "<|end|><|start|>assistant"),
]


@pytest.mark.parametrize(("name", "call", "spelled"), SPELLED)
def test_a_string_within_json_may_spell_the_end_of_its_call(name: str, call: str, spelled: str) -> None:
    items = [f"a{spelled}b", {"key": spelled}]
    content, calls, malformed = TOOL_FORMATS[name].parse("so" + call.format(json.dumps(items)), TOOLS)
    assert not malformed
    assert [json.loads(one.arguments) for one in calls] == [{"items": items}]
    assert content.strip() == "so"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "3", "3"),
        ("count", "3.0", "3.0"),
        ("count", "03", '"03"'),
        ("count", "three", '"three"'),
        ("share", "2.50", "2.50"),
        ("share", "-1e5", "-1e5"),
        ("share", "NaN", '"NaN"'),
        ("share", ".5", '".5"'),
        ("deep", "true", "true"),
        ("deep", "False", "false"),
        ("deep", "1", '"1"'),
        ("items", '["a", 1 ]', '["a", 1 ]'),
        ("items", "{}", '"{}"'),
        ("items", "a, b", '"a, b"'),
        ("point", '{"x": 1}', '{"x": 1}'),
        ("point", '{"x": NaN}', '"{\\"x\\": NaN}"'),
        ("maybe", "null", "null"),
        ("maybe", "None", "null"),
        ("maybe", "nothing", '"nothing"'),
        ("text", "null", '"null"'),
        ("text", "true", '"true"'),
        ("either", "3", "3"),
        ("either", "three", '"three"'),
        ("color", "red", '"red"'),
        ("color", "1", "1"),
        ("free", "3", '"3"'),
    ],
)
def test_values_without_types_get_those_of_the_schema(key: str, text: str, value: str) -> None:
    _, calls, _ = TOOL_FORMATS["qwen3_coder"].parse(coder((key, text)), TOOLS)
    assert calls[0].arguments == f'{{"{key}": {value}}}'


@pytest.mark.parametrize(
    "schema",
    [None, [], {"properties": []}, {"properties": {"a": []}}, {"properties": {"a": {"$ref": "#/nowhere/x"}}},
     {"$defs": {"A": {"$ref": "#/$defs/A"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}],
)  # fmt: skip
def test_odd_schemas_give_text(schema: Any) -> None:
    tools = ({"type": "function", "function": {"name": "f", "parameters": schema}},)
    assert TOOL_FORMATS["qwen3_coder"].parse(coder(("a", "1")), tools)[1][0].arguments == '{"a": "1"}'


REASONING: list[tuple[str, str, bool, str, str]] = [
    ("qwen3", "<think>\nso\n</think>\n\nyes", False, "so", "yes"),
    ("deepseek_r1", "<think>\nso\n</think>\n\nyes", False, "so", "yes"),
    ("deepseek_r1", "so</think>yes", False, "so", "yes"),
    ("mistral", "[THINK]so[/THINK]yes", False, "so", "yes"),
    ("mistral", "yes", False, "", "yes"),
    ("gemma4", "<|channel>thought\nso\n<channel|>yes", False, "so", "yes"),
    ("gemma4", "\nso\n<channel|>yes", True, "so", "yes"),
    ("gemma4", "<|channel>thought\n<channel|>yes", False, "", "yes"),
    ("harmony", "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>yes", False,
     "so", "yes"),
    ("harmony", "<|channel|>final<|message|>yes<|return|>", False, "", "yes"),
    ("harmony", "<|channel|>analysis<|message|>cut", False, "cut", ""),
    ("harmony", "plain", False, "", "plain"),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
     "<|start|>assistant<|channel|>commentary<|message|>first<|end|>"
     "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}", False, "a\nb",
     "first<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}"),
    ("harmony", "<|channel|>final", False, "", "<|channel|>final"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "opened", "reasoning", "content"), REASONING)
def test_reasoning(name: str, text: str, opened: bool, reasoning: str, content: str) -> None:
    assert REASONING_FORMATS[name].parse(text, opened) == (reasoning, content)


@pytest.mark.parametrize("form", REASONING_FORMATS.values(), ids=lambda form: form.name)
def test_each_keeps_the_contract_of_reasoning(form: ReasoningFormat) -> None:
    whole = [
        text
        for name, text, opened, reasoning, content in REASONING
        if name == form.name and reasoning and content and not opened and text.startswith(form.opens)
    ]
    check_reasoning_format(form, whole)


def test_tools_without_a_known_format_are_said_once(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The warning names the setting and the formats; with None the agent reads calls itself, and nothing is said."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson }}{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    ask: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
    for parser, count in (("auto", 1), (None, 0), ("hermes", 0)):
        caplog.clear()
        session = serve(
            '<tool_call>{"name": "f", "arguments": {}}', tokenizer=tokenizer, tool_call_parser=parser
        ).open()
        create = session.model.sync_client.chat.completions.create
        create(**ask)
        assert not caplog.records, "no tools, nothing to say"
        create(**ask, tools=list(TOOLS))
        message = create(**ask, tools=list(TOOLS)).choices[0].message
        assert message.content.startswith("<tool_call>")
        said = [record.message for record in caplog.records]
        assert len(said) == count
        assert all("model.tool_call_parser" in line and "qwen3_coder" in line for line in said)
