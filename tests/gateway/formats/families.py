"""Small chat templates in the manner of each family: what its own template writes for tools, calls, results, reasoning.

Written from the families' published templates, without their defaults, dates, images and instructions. `FAMILIES` has
one entry for each, and `family_tokenizer` a toy tokenizer with that template and its special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripted import toy_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A template, its end token and other special tokens, and the formats that should be found in it."""

    template: str
    end: str
    tool: str
    reasoning: str | None = None
    special: tuple[str, ...] = ()
    parallel: bool = True
    """Whether a message may have several calls."""
    content: bool = True
    """Whether a message with calls may have content before them."""


QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' + tools | tojson + '\\n<tool_call>\\n{\\"name\\": <name>, ' }}
{{- '\\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_QWEN35 = """
{%- if tools %}{{ '<|im_start|>system\\n<tools>' + tools | tojson + '</tools><tool_call>\\n<function=example>\\n' }}
{{- '<parameter=one>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n\\n' if content else '') if loop.first else '\\n' }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- VALUE }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
QWEN35 = _QWEN35.replace(
    "VALUE", "value | tojson if value is mapping or (value is sequence and value is not string) else value | string"
)
"""Writes true, false and null in Python's words."""
QWEN36 = _QWEN35.replace("VALUE", "value if value is string else value | tojson")

LLAMA3 = """
{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n{"name": function name, "parameters": dictionary}' }}
{{- tools | tojson + '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

PYTHONIC = """
{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n[func_name1(params_name1=params_value1)]' }}
{{- tools | tojson + '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n[' }}
        {%- for call in message.tool_calls %}
            {{- ', ' if not loop.first }}{{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments | items %}
                {{- ', ' if not loop.first }}{{- name + '=' }}{{- '%r' | format(value) }}
            {%- endfor %}
            {{- ')' }}
        {%- endfor %}
        {{- ']<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

LFM2 = """
{%- macro shown(value) %}
    {%- if value is string %}{{- "'" + value + "'" }}
    {%- elif value is mapping %}{{- value | tojson }}
    {%- else %}{{- value | string }}{%- endif %}
{%- endmacro %}
{%- if tools %}{{ '<|im_start|>system\\nList of tools: ' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.tool_calls %}
        {{- '<|tool_call_start|>[' }}
        {%- for call in message.tool_calls %}
            {{- ', ' if not loop.first }}{{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments | items %}
                {{- ', ' if not loop.first }}{{- name + '=' + shown(value) }}
            {%- endfor %}
            {{- ')' }}
        {%- endfor %}
        {{- ']<|tool_call_end|>' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

MISTRAL_LIST = """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set written = call.function | tojson %}
            {{- written[:-1] + ', "id": "' + call.id[-9:] + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id[-9:] + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

MISTRAL = """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- arguments if arguments is string else arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_IDS = MISTRAL.replace("call.function.name + '[ARGS]'", "call.function.name + '[CALL_ID]' + call.id + '[ARGS]'")
"""Version 11 of the tokenizer."""

_GEMMA = """
{%- macro shown(value) %}
    {%- if value is string %}{{- DELIMITER + value + DELIMITER }}
    {%- elif value is boolean %}{{- 'true' if value else 'false' }}
    {%- elif value is mapping %}{{- '{' }}
        {%- for name, inner in value | dictsort %}{{- ',' if not loop.first }}{{- name + ':' + shown(inner) }}
        {%- endfor %}{{- '}' }}
    {%- elif value is sequence %}{{- '[' }}
        {%- for inner in value %}{{- ',' if not loop.first }}{{- shown(inner) }}{%- endfor %}{{- ']' }}
    {%- else %}{{- value }}{%- endif %}
{%- endmacro %}"""
GEMMA4 = (
    _GEMMA.replace("DELIMITER", "'<|\"|>'")
    + """
{%- set turn = namespace(open=false) %}
{%- if tools %}{{- '<|turn>system\\n<|tool>' + tools | tojson + '<tool|><turn|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|turn>user\\n' + message.content | trim + '<turn|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|tool_response>response:f{value:' + shown(message.content) + '}<tool_response|>' }}
    {%- else %}
        {{- '<|turn>model\\n' if not turn.open }}
        {%- set turn.open = message.tool_calls and true %}
        {%- if message.reasoning_content %}
            {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + '{' }}
            {%- if call.function.arguments is mapping %}
                {%- for name, value in call.function.arguments | dictsort %}
                    {{- ',' if not loop.first }}{{- name + ':' + shown(value) }}
                {%- endfor %}
            {%- elif call.function.arguments is string %}{{- call.function.arguments }}{%- endif %}
            {{- '}<tool_call|>' }}
        {%- endfor %}
        {{- message.content | trim }}
        {{- '<turn|>\\n' if not message.tool_calls }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not turn.open %}{{- '<|turn>model\\n' }}{%- endif %}"""
)

FUNCTIONGEMMA = (
    _GEMMA.replace("DELIMITER", "'<escape>'")
    + """
{%- if tools %}{{- '<start_of_turn>developer\\n' + tools | tojson + '<end_of_turn>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<start_function_response>response:f{value:' + shown(message.content) + '}<end_function_response>' }}
    {%- else %}
        {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<start_function_call>call:' + call.function.name + shown(call.function.arguments) }}
            {{- '<end_function_call>' }}
        {%- endfor %}
        {{- '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
)

_DEEPSEEK = """
{{- tools | tojson if tools }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜></think>' if loop.index0 > 0 and messages[loop.index0 - 1].role == 'user' }}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- CALL }}
            {{- '<｜tool▁calls▁end｜>' if loop.last }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}{{- '<｜Assistant｜></think>' }}{%- endif %}"""
DEEPSEEK_V3 = _DEEPSEEK.replace(
    "CALL",
    "('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name "
    "+ '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>'",
)
DEEPSEEK_V31 = _DEEPSEEK.replace(
    "CALL",
    "'<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>'",
)

HARMONY = """
{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' }}
{{- '<|start|>developer<|message|>namespace functions ' + tools | tojson + '<|end|>' if tools }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.tool_calls %}
        {%- if message.content and message.thinking %}{{- raise_exception('not both') }}
        {%- elif message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

_GLM = """[gMASK]<sop>
{%- if tools %}{{ '<|system|>\\n' + tools | tojson + '<tool_call>{name}<arg_key>{key}</arg_key>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|user|>\\n' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\\n<think>' + (message.reasoning_content or '').strip() + '</think>' }}
        {{- '\\n' + message.content.strip() if message.content.strip() }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + NEWLINE }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<arg_key>' + name + '</arg_key>' + NEWLINE + '<arg_value>' }}
                {{- (value if value is string else value | tojson(ensure_ascii=False)) + '</arg_value>' + NEWLINE }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}{{- '<|observation|>\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
GLM45 = _GLM.replace("NEWLINE", "'\\n'")
GLM47 = _GLM.replace("NEWLINE", "''")

KIMI_K2 = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|im_user|>user<|im_middle|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|><think>' + (message.reasoning_content or '') + '</think>' }}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '<|tool_calls_section_begin|>' if loop.first }}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- (arguments if arguments is string else arguments | tojson) + '<|tool_call_end|>' }}
            {{- '<|tool_calls_section_end|>' if loop.last }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_system|>tool<|im_middle|>## Return of ' + message.tool_call_id + '\\n' + message.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""

_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|return|>")
_DEEPSEEK_TOKENS = ("<｜User｜>", "<｜Assistant｜>")
_MISTRAL_TOKENS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_GEMMA4_TOKENS = ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")

FAMILIES = {
    "qwen3": Family(template=QWEN3, end="<|im_end|>", tool="hermes", reasoning="qwen3"),
    "qwen3.5": Family(template=QWEN35, end="<|im_end|>", tool="qwen3_coder", reasoning="qwen3"),
    "qwen3.6": Family(template=QWEN36, end="<|im_end|>", tool="qwen3_coder", reasoning="qwen3"),
    "llama3": Family(template=LLAMA3, end="<|eot_id|>", tool="llama3_json", parallel=False, content=False),
    "pythonic": Family(template=PYTHONIC, end="<|eot_id|>", tool="pythonic", content=False),
    "lfm2": Family(
        template=LFM2,
        end="<|im_end|>",
        tool="pythonic",
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
        content=False,
    ),
    "mistral_list": Family(template=MISTRAL_LIST, end="</s>", tool="mistral", special=_MISTRAL_TOKENS, content=False),
    "mistral_ids": Family(template=MISTRAL_IDS, end="</s>", tool="mistral", special=_MISTRAL_TOKENS),
    "mistral": Family(template=MISTRAL, end="</s>", tool="mistral", special=_MISTRAL_TOKENS),
    "gemma4": Family(
        template=GEMMA4,
        end="<|tool_response>",
        tool="gemma4",
        reasoning="gemma4",
        special=_GEMMA4_TOKENS,
        content=False,
    ),
    "functiongemma": Family(
        template=FUNCTIONGEMMA,
        end="<end_of_turn>",
        tool="functiongemma",
        special=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "deepseek_v3": Family(
        template=DEEPSEEK_V3,
        end="<｜end▁of▁sentence｜>",
        tool="deepseek_v3",
        reasoning="deepseek_r1",
        special=_DEEPSEEK_TOKENS,
    ),
    "deepseek_v31": Family(
        template=DEEPSEEK_V31,
        end="<｜end▁of▁sentence｜>",
        tool="deepseek_v31",
        reasoning="deepseek_r1",
        special=_DEEPSEEK_TOKENS,
    ),
    "harmony": Family(
        template=HARMONY,
        end="<|call|>",
        tool="harmony",
        reasoning="harmony",
        special=_HARMONY_TOKENS,
        parallel=False,
        content=False,
    ),
    "glm4.5": Family(template=GLM45, end="<|observation|>", tool="glm45", reasoning="qwen3", special=("<|user|>",)),
    "glm4.7": Family(template=GLM47, end="<|observation|>", tool="glm45", reasoning="qwen3", special=("<|user|>",)),
    "kimi_k2": Family(template=KIMI_K2, end="<|im_end|>", tool="kimi_k2", reasoning="qwen3"),
}


def family_tokenizer(family: Family) -> Any:
    """A toy tokenizer with the family's template, its end token and its special tokens."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = family.template
    tokenizer.add_special_tokens({"eos_token": family.end, "additional_special_tokens": list(family.special)})
    return tokenizer
